"""The training loop: steps on the device, and a flush every few steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from stability_lab.data.loader import Sampler
from stability_lab.data.repeats import repetitive
from stability_lab.diagnostics.probe import probe_attention, validate
from stability_lab.judge.events import find_events
from stability_lab.judge.series import perplexity
from stability_lab.judge.verdict import diverged_at
from stability_lab.model.transformer import GPT
from stability_lab.objective.loss import IGNORE
from stability_lab.training.checkpoint import Checkpoints, State, weights_of
from stability_lab.training.history import History, Row
from stability_lab.training.inject import Injector
from stability_lab.training.schedule import Schedule
from stability_lab.training.step import COLUMNS, TrainStep, autocast

_log = logging.getLogger("stability_lab")


class Sink(Protocol):
    """Where rows and events go: the files of the run, its mirror and the console."""

    def rows(self, rows: Sequence[Row]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Intervals:
    """What the loop does when; `None` means only before and after the run."""

    max_steps: int
    micro_batch_size: int
    grad_accum_steps: int
    seq_len: int
    log_every: int
    eval_every: int | None
    probe_every: int | None
    stop_on_divergence: bool = False
    mask_repeats: bool = False  # no loss on sequences with a repeated n-gram


class Loop:
    """Runs a `TrainStep` to its end; `history` is valid at any moment, also after an exception.

    `stopped_by` is None, `nonfinite` (the last row is the bad step), `divergence` (finite; evaluated before the end) or
    `interruption`: `interrupted`, asked after each step, said so.

    Flushes, looks for events and looks for a divergence fall on steps that follow from the step's number alone. What
    comes when the clock or a person wants it, a checkpoint or an interruption, flushes in between and moves none of
    them. So a run that is resumed from a checkpoint goes on as if it had never stopped.
    """

    def __init__(
        self,
        model: GPT,
        step: TrainStep,
        schedule: Schedule,
        sampler: Sampler,
        eval_windows: torch.Tensor,
        eval_bytes: int,
        probe_windows: torch.Tensor,
        plan: Intervals,
        sink: Sink,
        injector: Injector | None = None,
        checkpoints: Checkpoints | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.model, self.step, self.schedule, self.sampler = model, step, schedule, sampler
        self.eval_windows, self.eval_bytes, self.probe_windows = eval_windows, eval_bytes, probe_windows
        self.plan, self.sink = plan, sink
        self.injector = injector or Injector()
        self.checkpoints, self.interrupted = checkpoints, interrupted
        self.history = History()
        self.stopped_by: str | None = None
        self._buffer = torch.zeros(min(plan.log_every, plan.max_steps), len(COLUMNS), device=step.device)
        self._pending: list[Row] = []
        self._spent, self._timed = 0.0, 0  # seconds and steps since the speed was last reported
        self._next_check = 0
        self._judged = 0  # rows whose events are delivered

    def run(self) -> None:
        """From the first step, or the one after `load_state`, to the end. CheckpointError where the disk is full."""
        plan = self.plan
        if not self.history.n:
            self.history.add_measured(self._measure(validation=True, probe=True))
        for step in range(self.history.n + 1, plan.max_steps + 1):
            started = time.perf_counter()
            self._train(step)
            last = step == plan.max_steps
            validation = _due(step, plan.eval_every, last)
            probe = _due(step, plan.probe_every, last)
            scheduled = validation or probe or step % plan.log_every == 0
            saves = self._saves(step, last)
            if not last and self.interrupted():
                self.stopped_by = "interruption"
            if not (scheduled or saves or self.stopped_by):
                self._spent += time.perf_counter() - started
                continue
            values = self._buffer[: len(self._pending)].tolist()
            self._spent += time.perf_counter() - started
            rows = self._complete(values, scheduled)
            if scheduled and not last and self.stopped_by is None and self._has_diverged():
                self.stopped_by = "divergence"
                validation = probe = True
            is_best = False
            if scheduled and self.stopped_by != "nonfinite":
                measured = self._measure(validation, probe)
                is_best = self.history.add_measured(measured)
                rows[-1] |= measured
            ends = last or self.stopped_by in ("nonfinite", "divergence")
            self._deliver(rows, scheduled, ends)
            # Only now, when the rows are written: a full disk ends the run here.
            if is_best and self.checkpoints is not None:
                self.checkpoints.save_best(weights_of(self.model), self.history.n, self.history.best)
            if saves or self.stopped_by:
                self._save()
            if self.stopped_by:
                return

    def flush(self) -> None:
        """Deliver what is still on the device; for a run that ends by an exception."""
        if self._pending:
            self._deliver(self._complete(self._buffer[: len(self._pending)].tolist(), True), True, ends=True)

    def state(self) -> State:
        """Everything that the steps to come depend on; only right after a flush."""
        assert not self._pending
        columns, measured = self.history.state()
        training = {
            **self.step.state(),
            **{f"series/{key}": torch.from_numpy(values) for key, values in columns.items()},
            "random/cpu": torch.get_rng_state(),
        }
        if self.step.device.type == "cuda":
            training["random/cuda"] = torch.cuda.get_rng_state(self.step.device)
        n = self.history.n
        plain = {"step": n, "tokens": n * self._tokens_a_step, "history": measured}
        plain |= {"next_check": self._next_check, "judged": self._judged}
        if hasattr(self.sampler, "state_dict"):  # a stream's; otherwise the step says which samples come next
            plain["sampler"] = self.sampler.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        return State(weights_of(self.model), training, plain)

    def load_state(self, state: State) -> None:
        """Go on from `state`; ValueError where it is not one of this model and configuration."""
        plain, tensors = state.plain, state.training
        device = self.step.device
        columns = {k.removeprefix("series/"): v.numpy() for k, v in tensors.items() if k.startswith("series/")}
        try:
            self.model.load_state_dict(state.model)
            self.step.load_state(tensors)
            self.history.load_state(columns, plain["history"])
            self._next_check, self._judged = int(plain["next_check"]), int(plain["judged"])
            if "sampler" in plain:
                self.sampler.load_state_dict(plain["sampler"])  # pyright: ignore[reportAttributeAccessIssue]
            torch.set_rng_state(tensors["random/cpu"])
            if device.type == "cuda" and "random/cuda" in tensors:
                torch.cuda.set_rng_state(tensors["random/cuda"], device)
        except (RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error).splitlines()[0]) from error
        if self.history.n != plain["step"]:
            raise ValueError(f"it holds {self.history.n} rows for {plain['step']} steps")

    def events_so_far(self) -> list[Row]:
        """The events that have been delivered by now, with length and recovery as known today."""
        return [event.as_dict() for event in find_events(self.history.log().rows(slice(self._judged)))]

    @property
    def _tokens_a_step(self) -> int:
        return self.plan.micro_batch_size * self.plan.grad_accum_steps * self.plan.seq_len

    def _saves(self, step: int, last: bool) -> bool:
        if self.checkpoints is None:
            return False
        return last or self.checkpoints.due(step) or self.injector.saves(step)

    def _save(self) -> None:
        """A checkpoint; of a run that a bad step has ended the weights before it, which is where it stopped."""
        if self.checkpoints is None:
            return
        n = self.history.n
        if self.stopped_by == "nonfinite":
            saved = self.checkpoints.save_last_weights(weights_of(self.model), n - 1)
        else:
            saved = self.checkpoints.save(self.state(), lambda: self.injector.in_checkpoint(n))
        if not saved:
            _log.warning("no checkpoint at step %d: a weight is not finite, so the one before it stays", n)

    def _train(self, step: int) -> None:
        plan, inject = self.plan, self.injector
        inject.before(step)
        n = plan.micro_batch_size * plan.grad_accum_steps
        batch = inject.tokens(step, torch.from_numpy(self.sampler.batch((step - 1) * n, n)))
        masked = repetitive(batch.numpy()) if plan.mask_repeats else np.zeros(0, dtype=bool)
        if self.step.device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self.step.device, non_blocking=True)
        lr = inject.lr(step, self.schedule.lr(step))
        targets = inject.targets(step, batch[:, 1:])
        if masked.any():
            targets = targets.masked_fill(torch.from_numpy(masked).to(self.step.device)[:, None], IGNORE)
        self._buffer[len(self._pending)] = self.step(batch, lr, targets, inject.poison(step))
        self._pending.append({"step": step, "tokens": step * n * plan.seq_len, "optim/lr": lr})
        if plan.mask_repeats:
            self._pending[-1]["train/masked_sequences"] = int(masked.sum())

    def _complete(self, values: list[list[float]], timed: bool) -> list[Row]:
        """Rows of the pending steps; where a bad step stops the run, up to it, for no later one changed anything."""
        rows = []
        for row, measured in zip(self._pending, values, strict=True):
            row |= dict(zip(COLUMNS, measured, strict=True))
            bad, empty = bool(row.pop("bad")), bool(row.pop("empty"))
            row["train/ppl"] = perplexity(row["train/loss"])
            if empty:  # there is nothing that a loss could be the mean of
                row |= {"train/loss": None, "train/ppl": None, "optim/skipped": 1.0}
            if bad and self.step.on_nonfinite == "skip":
                row["optim/skipped"] = 1.0
            rows.append(row)
            self.history.add(row)
            if bad and self.step.on_nonfinite == "stop":
                self.stopped_by = "nonfinite"
                break
        self._timed += len(self._pending)
        self._pending = []
        if timed:
            rows[-1]["perf/tokens_per_s"] = self._tokens_a_step * self._timed / max(self._spent, 1e-9)
            self.history.tokens_per_s.append(rows[-1]["perf/tokens_per_s"])
            self._spent, self._timed = 0.0, 0
        return rows

    def _deliver(self, rows: list[Row], scheduled: bool, ends: bool) -> None:
        self.sink.rows(rows)
        # Events are looked for a hundred times in a run: at every flush, the cost would grow with its square.
        if ends or (scheduled and self.history.n - self._judged >= self.plan.max_steps / 100):
            for event in find_events(self.history.log(), start=self._judged):
                self.sink.event(event.as_dict())
            self._judged = self.history.n

    def _has_diverged(self) -> bool:
        """The judge's finite rule, asked at most a hundred times in a run so that long ones do not pay for it."""
        if not self.plan.stop_on_divergence or self.history.n < self._next_check:
            return False
        self._next_check = self.history.n + max(self.plan.log_every, self.plan.max_steps // 100)
        return diverged_at(self.history.log(), self.schedule.warmup_steps) is not None

    def _measure(self, validation: bool, probe: bool) -> Row:
        measured: Row = {}
        with autocast(self.step.device, self.step.precision):
            if validation:
                measured |= validate(self.model, self.eval_windows, self.plan.micro_batch_size, self.eval_bytes)
            if probe:
                measured |= probe_attention(self.model, self.probe_windows)
        return measured


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)
