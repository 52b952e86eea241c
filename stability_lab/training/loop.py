"""The training loop: steps on the device, and a flush every few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from stability_lab.config import TrainConfig
from stability_lab.data.loader import Sampler
from stability_lab.data.repeats import repetitive
from stability_lab.data.source import TokenData
from stability_lab.diagnostics.probe import probe_attention, validate
from stability_lab.judge.judgement import Judgement
from stability_lab.judge.series import Row, perplexity
from stability_lab.judge.verdict import Evidence
from stability_lab.judge.watch import Watch
from stability_lab.machine.clock import Clock, busy
from stability_lab.machine.precision import autocast
from stability_lab.model.transformer import GPT
from stability_lab.objective.objective import Objective
from stability_lab.seams import Stabilizer
from stability_lab.training.checkpoint import Checkpoints, State, put_weights, weights_of
from stability_lab.training.inject import Injector
from stability_lab.training.ranks import Ranks
from stability_lab.training.schedule import Schedule
from stability_lab.training.step import TrainStep

_log = logging.getLogger("stability_lab")
_CLIP = "optim/clip_coef"
LOOK_S = 5.0  # of training between two looks at how busy the machine is


class Run(NamedTuple):
    """The objects of one training run."""

    config: TrainConfig
    device: torch.device
    stabilizers: list[Stabilizer]
    data: TokenData
    model: GPT
    init: dict[str, str]  # parameter name -> hash of its initial values
    step: TrainStep
    schedule: Schedule
    sampler: Sampler
    eval_windows: torch.Tensor  # (M, T+1)
    eval_bytes: int  # of text that their targets stand for
    probe_windows: torch.Tensor  # (P, T+1)
    optimal_loss: float | None  # on the evaluation windows, where the source of the data is known

    @property
    def objective(self) -> Objective:
        return self.step.objective

    @property
    def ranks(self) -> Ranks:
        return self.step.ranks


class Sink(Protocol):
    """Where rows and events go: the files of the run, its mirror and the console."""

    def rows(self, rows: Sequence[Row]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...


class Loop:
    """Trains a run to its end; `watch` is valid at any moment, also after an exception.

    `stopped_by` is None, `nonfinite` (the last row is the bad step), `divergence` (finite; evaluated before the end) or
    `interruption`: `interrupted`, asked after each step, said so.

    Scheduled flushes, and with them the judge's looks, fall on steps that follow from the step's number alone. What
    comes when the clock or a person wants it, a checkpoint or an interruption, flushes in between and moves none of
    them. So a run that is resumed from a checkpoint goes on as if it had never stopped.
    """

    def __init__(
        self,
        run: Run,
        sink: Sink,
        injector: Injector | None = None,
        checkpoints: Checkpoints | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.run, self.sink = run, sink
        self.injector = injector or Injector()
        self.checkpoints, self.interrupted = checkpoints, interrupted
        self.watch = Watch(
            Evidence(
                unigram_entropy=run.objective.trivial_loss(run.data.unigram_entropy),
                vocab_size=run.model.config.vocab_size,
                warmup_steps=run.schedule.warmup_steps,
                own=True,
            ),
            more=(_CLIP,),
            perplexity_name=run.objective.traits.perplexity,
        )
        self.speeds: list[float] = []  # tokens/s of each timed flush; the clock's, so no series
        self.stopped_by: str | None = None
        trainer = run.config.trainer
        self._sequences = trainer.micro_batch_size * trainer.grad_accum_steps  # of a step
        self._tokens = self._sequences * run.config.model.seq_len
        rows = min(trainer.log_every, trainer.max_steps)
        self._buffer = torch.zeros(rows, len(run.step.columns), device=run.device)
        self._pending: list[Row] = []
        self._clock, self._timed = Clock(), 0  # time and steps since the speed was last reported
        self._recent = Clock()  # of the flushes since the last look at how busy the machine is
        self._told = run.device.type != "cpu"  # that other work slows this run down

    def train(self) -> None:
        """Train to the end, from the first step or after `load_state`. CheckpointError where the disk is full."""
        run, config, watch = self.run, self.run.config, self.watch
        max_steps = config.trainer.max_steps
        if not watch.n:
            watch.measure(0, self._measure(validation=True, probe=True))
        for step in range(watch.n + 1, max_steps + 1):
            with self._clock.running():
                self._take(step)
            last = step == max_steps
            validation = _due(step, config.trainer.eval_every, last)
            probe = _due(step, config.diagnostics.probe_every, last)
            scheduled = validation or probe or step % config.trainer.log_every == 0
            saves = self._saves(step, last, scheduled)
            if not last and (scheduled or run.ranks.size == 1) and run.ranks.any(self.interrupted()):
                self.stopped_by = "interruption"
            if not (scheduled or saves or self.stopped_by):
                continue
            with self._clock.running():
                values = self._buffer[: len(self._pending)].tolist()
            rows = self._complete(values, scheduled)
            may_stop = scheduled and not last and self.stopped_by is None and config.stability.stop_on_divergence
            if may_stop and run.ranks.any(watch.sees_divergence()):
                self.stopped_by = "divergence"
                validation = probe = True
            is_best = False
            if scheduled and self.stopped_by != "nonfinite":
                measured = self._measure(validation, probe)
                is_best = watch.measure(watch.n, measured)
                rows[-1] |= measured
                watch.add(rows[-1:])
            ends = last or self.stopped_by in ("nonfinite", "divergence")
            self._deliver(rows, scheduled, ends)
            # Only now, when the rows are written: a full disk ends the run here.
            if is_best and config.trainer.save_weights:
                weights = self._weights()
                if self.checkpoints is not None:
                    self.checkpoints.save_best(weights, watch.n, watch.best)
            if saves or self.stopped_by:
                self._save()
            if self.stopped_by:
                return

    def flush(self) -> None:
        """Deliver what is still on the device; for a run that ends by an exception."""
        if self._pending:
            self._deliver(self._complete(self._buffer[: len(self._pending)].tolist(), True), True, ends=True)

    def judge(self) -> tuple[Judgement | None, Row]:
        """The judgement on the run, None before its first step, and what summary.json says of it."""
        judgement, summary = self.watch.judge(nonfinite=self.stopped_by == "nonfinite")
        speeds = self.speeds[1:] or self.speeds  # the first flush holds warm-up and compilation
        clipped = self.watch.series.column(_CLIP) < 1
        return judgement, summary | {
            "clip_fraction": float(clipped.mean()) if len(clipped) else None,
            "tokens_per_s": float(np.median(speeds)) if speeds else None,
        }

    def state(self) -> State:
        """Everything that the steps to come depend on; only right after a flush."""
        assert not self._pending
        run, (columns, watched) = self.run, self.watch.state()
        training = {
            **run.step.state(),
            **{f"series/{key}": torch.from_numpy(values) for key, values in columns.items()},
            "random/cpu": torch.get_rng_state(),
        }
        if run.device.type == "cuda":
            training["random/cuda"] = torch.cuda.get_rng_state(run.device)
        n = self.watch.n
        plain = {"step": n, "tokens": n * self._tokens, "watch": watched, "tokens_per_s": self.speeds}
        plain["sampler"] = run.sampler.state()
        return State(self._weights(), training, plain)

    def load_state(self, state: State) -> None:
        """Go on from `state`; ValueError where it is not one of this model and configuration."""
        run, plain, tensors = self.run, state.plain, state.training
        columns = {k.removeprefix("series/"): v.numpy() for k, v in tensors.items() if k.startswith("series/")}
        own = weights_of(run.model)
        put_weights(run.model, {n: run.ranks.divided(t, own[n]) if n in own else t for n, t in state.model.items()})
        run.step.load_state(tensors)
        with _part("the measurements so far"):
            self.watch.load_state(columns, plain["watch"])
            self.speeds = [float(speed) for speed in plain["tokens_per_s"]]
        with _part("the place in the data"):
            run.sampler.load_state(plain["sampler"])
        with _part("the state of torch's random numbers"):
            torch.set_rng_state(tensors["random/cpu"])
            if run.device.type == "cuda" and "random/cuda" in tensors:
                torch.cuda.set_rng_state(tensors["random/cuda"], run.device)
        if self.watch.n != plain["step"]:
            raise ValueError(f"it holds {self.watch.n} rows for {plain['step']} steps")

    def _weights(self) -> dict[str, torch.Tensor]:
        return self.run.ranks.whole(weights_of(self.run.model))

    def _saves(self, step: int, last: bool, scheduled: bool) -> bool:
        if not self.run.config.trainer.save_weights or last:
            return last and self.run.config.trainer.save_weights
        due = self.checkpoints is not None and (self.checkpoints.due(step) or self.injector.saves(step))
        return due if self.run.ranks.size == 1 else scheduled and self.run.ranks.any(due)

    def _save(self) -> None:
        """A checkpoint; of a run that a bad step has ended the weights before it, which is where it stopped."""
        if not self.run.config.trainer.save_weights:
            return
        n, bad = self.watch.n, self.stopped_by == "nonfinite"
        state = None if bad else self.state()  # all ranks take part in it
        weights = self._weights() if state is None else state.model
        if self.checkpoints is None:
            return
        if state is None:
            saved = self.checkpoints.save_last_weights(weights, n - 1)
        else:
            saved = self.checkpoints.save(state, lambda: self.injector.in_checkpoint(n))
        if not saved:
            _log.warning("no checkpoint at step %d: a weight is not finite, so the one before it stays", n)

    def _take(self, step: int) -> None:
        run, inject, n = self.run, self.injector, self._sequences
        own = run.ranks.part(n)
        inject.before(step)
        first = (step - 1) * n
        windows = inject.tokens(step, torch.from_numpy(run.sampler.batch(first, n)))
        mask_repeats = run.config.sampling.mask_repeats  # no loss on sequences with a repeated n-gram
        masked = repetitive(windows.numpy()) if mask_repeats else np.zeros(0, dtype=bool)
        if run.device.type == "cuda":
            windows = windows.pin_memory()
        batch = run.objective.batch(windows[own].to(run.device, non_blocking=True), first + own.start)
        batch = inject.targets(step, batch)
        if masked.any():
            batch = batch.without(torch.from_numpy(masked[own]).to(run.device))
        lr = inject.lr(step, run.schedule.lr(step))
        self._buffer[len(self._pending)] = run.step(batch, lr, inject.poison(step))
        self._pending.append({"step": step, "tokens": step * self._tokens, "optim/lr": lr})
        if mask_repeats:
            self._pending[-1]["train/masked_sequences"] = int(masked.sum())

    def _complete(self, values: list[list[float]], timed: bool) -> list[Row]:
        """Rows of the pending steps; where a bad step stops the run, up to it, for no later one changed anything."""
        rows, on_nonfinite = [], self.run.step.on_nonfinite
        ppl = f"train/{self.run.objective.traits.perplexity}"
        for row, measured in zip(self._pending, values, strict=True):
            row |= dict(zip(self.run.step.columns, measured, strict=True))
            bad, empty = bool(row.pop("bad")), bool(row.pop("empty"))
            row[ppl] = perplexity(row["train/loss"])
            if empty:  # there is nothing that a loss could be the mean of
                row |= {"train/loss": None, ppl: None, "optim/skipped": 1.0}
            if bad and on_nonfinite == "skip":
                row["optim/skipped"] = 1.0
            rows.append(row)
            if bad and on_nonfinite == "stop":
                self.stopped_by = "nonfinite"
                break
        self._timed += len(self._pending)
        self._pending = []
        if timed:
            self.speeds.append(self._tokens * self._timed / max(self._clock.wall_s, 1e-9))
            rows[-1]["perf/tokens_per_s"] = self.speeds[-1]
            self._look_around()
            self._clock, self._timed = Clock(), 0
        self.watch.add(rows)
        return rows

    def _look_around(self) -> None:
        """One notice where the machine is busy; the first flush holds warm-up and compilation."""
        if self._told or len(self.speeds) < 2:
            return
        self._recent += self._clock
        if self._recent.wall_s < LOOK_S:
            return
        threads = torch.get_num_threads()
        if (notice := busy(self._recent.share(threads), threads)) is not None:
            _log.info("notice: %s", notice, extra={"in_sweep": True})
            self._told = True
        self._recent = Clock()

    def _deliver(self, rows: list[Row], scheduled: bool, ends: bool) -> None:
        self.sink.rows(rows)
        if scheduled or ends:
            for event in self.watch.look(ends=ends):
                self.sink.event(event.as_dict())

    def _measure(self, validation: bool, probe: bool) -> Row:
        run = self.run
        measured: Row = {}
        with autocast(run.device, run.step.precision):
            if validation:
                size = run.step.at_once(run.config.trainer.micro_batch_size)
                measured |= validate(run.model, run.objective, run.eval_windows, size, run.eval_bytes)
            if probe:
                measured |= probe_attention(run.model, run.objective, run.probe_windows)
        return measured


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


@contextmanager
def _part(name: str) -> Iterator[None]:
    """ValueError that names a part of a checkpoint where it is missing or of another form."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{name}: {error.args[0]} is missing") from error
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}: not of the form that this version writes") from error
