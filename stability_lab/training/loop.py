"""The training loop: steps on the device, and a flush every few steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from stability_lab.data.loader import Sampler
from stability_lab.data.repeats import repetitive
from stability_lab.diagnostics.probe import perplexity, probe_attention, validate
from stability_lab.judge.events import find_events
from stability_lab.judge.verdict import diverged_at
from stability_lab.model.gpt import GPT
from stability_lab.objective.loss import IGNORE
from stability_lab.training.history import History, Row
from stability_lab.training.inject import Injector
from stability_lab.training.schedule import Schedule
from stability_lab.training.step import COLUMNS, TrainStep, autocast


class Sink(Protocol):
    """Where rows and events go: the files of the run, its mirror and the console."""

    def rows(self, rows: Sequence[Row]) -> None: ...

    def event(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Plan:
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

    `stopped_by` is None, `nonfinite` (the last row is the bad step) or `divergence` (finite; evaluated before the end).
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
        plan: Plan,
        sink: Sink,
        injector: Injector | None = None,
    ):
        self.model, self.step, self.schedule, self.sampler = model, step, schedule, sampler
        self.eval_windows, self.eval_bytes, self.probe_windows = eval_windows, eval_bytes, probe_windows
        self.plan, self.sink = plan, sink
        self.injector = injector or Injector()
        self.history = History(plan.max_steps)
        self.stopped_by: str | None = None
        self._buffer = torch.zeros(plan.log_every, len(COLUMNS), device=step.device)
        self._pending: list[Row] = []
        self._spent = 0.0
        self._next_check = 0
        self._judged = 0  # rows whose events are delivered

    def run(self) -> None:
        self.history.add_measured(self._measure(validation=True, probe=True))
        for step in range(1, self.plan.max_steps + 1):
            started = time.perf_counter()
            self._train(step)
            last = step == self.plan.max_steps
            validation = _due(step, self.plan.eval_every, last)
            probe = _due(step, self.plan.probe_every, last)
            if not (validation or probe or len(self._pending) == self.plan.log_every):
                self._spent += time.perf_counter() - started
                continue
            values = self._buffer[: len(self._pending)].tolist()
            self._spent += time.perf_counter() - started
            rows = self._complete(values)
            if self.stopped_by is None and not last and self._has_diverged():
                self.stopped_by = "divergence"
                validation = probe = True
            if self.stopped_by != "nonfinite":
                measured = self._measure(validation, probe)
                self.history.add_measured(measured)
                rows[-1] |= measured
            self._deliver(rows, at_end=last or self.stopped_by is not None)
            if self.stopped_by is not None:
                return

    def flush(self) -> None:
        """Deliver what is still on the device; for a run that ends by an exception."""
        if self._pending:
            self._deliver(self._complete(self._buffer[: len(self._pending)].tolist()), at_end=True)

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

    def _complete(self, values: list[list[float]]) -> list[Row]:
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
        tokens_per_step = rows[0]["tokens"] / rows[0]["step"]
        rows[-1]["perf/tokens_per_s"] = tokens_per_step * len(self._pending) / max(self._spent, 1e-9)
        self.history.tokens_per_s.append(rows[-1]["perf/tokens_per_s"])
        self._pending, self._spent = [], 0.0
        return rows

    def _deliver(self, rows: list[Row], at_end: bool) -> None:
        self.sink.rows(rows)
        # Events are looked for a hundred times in a run: at every flush, the cost would grow with its square.
        if at_end or self.history.n - self._judged >= self.plan.max_steps / 100:
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
