"""The training loop: steps on the device, a flush every few steps, and the summary of what came out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from stability_lab.data.loader import TrainSampler
from stability_lab.diagnostics.probe import perplexity, probe_attention, validate
from stability_lab.judge.spikes import SpikeScore, flag_spikes, spike_score
from stability_lab.judge.verdict import verdict
from stability_lab.model.gpt import GPT
from stability_lab.training.schedule import Schedule
from stability_lab.training.step import COLUMNS, TrainStep, autocast

Row = dict[str, Any]
LAST = 20  # steps that the final training loss is the mean of


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


@dataclass
class History:
    """What the judge and the summary need of every step so far."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    clip_coef: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    measured: Row = field(default_factory=dict)  # the newest validation and probe values
    initial: Row = field(default_factory=dict)
    best: Row = field(default_factory=dict)
    max_attn_logit: float = float("-inf")
    tokens: int = 0


class Loop:
    """Runs a `TrainStep` to its end; `history` is valid at any moment, also after an exception."""

    def __init__(
        self,
        model: GPT,
        step: TrainStep,
        schedule: Schedule,
        sampler: TrainSampler,
        eval_windows: torch.Tensor,
        eval_bytes: int,
        probe_windows: torch.Tensor,
        plan: Plan,
        sink: Sink,
    ):
        self.model, self.step, self.schedule, self.sampler = model, step, schedule, sampler
        self.eval_windows, self.eval_bytes, self.probe_windows = eval_windows, eval_bytes, probe_windows
        self.plan, self.sink = plan, sink
        self.history = History()
        self.diverged = False
        self._buffer = torch.zeros(plan.log_every, len(COLUMNS), device=step.device)
        self._pending: list[Row] = []
        self._spent = 0.0

    def run(self) -> None:
        self.history.initial = self._measure(validation=True, probe=True)
        self.history.measured = {}
        for step in range(1, self.plan.max_steps + 1):
            started = time.perf_counter()
            self._train(step)
            last = step == self.plan.max_steps
            validation, probe = (
                _due(step, self.plan.eval_every, last),
                _due(step, self.plan.probe_every, last),
            )
            if not (validation or probe or len(self._pending) == self.plan.log_every):
                self._spent += time.perf_counter() - started
                continue
            values = self._buffer[: len(self._pending)].tolist()
            self._spent += time.perf_counter() - started
            rows = self._complete(values)
            if not self.diverged:
                rows[-1] |= self._measure(validation, probe)
            self._deliver(rows)
            if self.diverged:
                return

    def flush(self) -> None:
        """Deliver what is still on the device; for a run that ends by an exception."""
        if self._pending:
            self._deliver(self._complete(self._buffer[: len(self._pending)].tolist()))

    def _train(self, step: int) -> None:
        plan = self.plan
        n = plan.micro_batch_size * plan.grad_accum_steps
        batch = torch.from_numpy(self.sampler.batch((step - 1) * n, n))
        if self.step.device.type == "cuda":
            batch = batch.pin_memory()
        lr = self.schedule.lr(step)
        self._buffer[len(self._pending)] = self.step(batch.to(self.step.device, non_blocking=True), lr)
        self._pending.append({"step": step, "tokens": step * n * plan.seq_len, "optim/lr": lr})

    def _complete(self, values: list[list[float]]) -> list[Row]:
        """Rows of the pending steps, up to and with the first bad one: no later step changed anything."""
        rows, history = [], self.history
        for row, measured in zip(self._pending, values, strict=True):
            row |= dict(zip(COLUMNS, measured, strict=True))
            self.diverged = bool(row.pop("bad"))
            row["train/ppl"] = perplexity(row["train/loss"])
            rows.append(row)
            history.loss.append(row["train/loss"])
            history.grad_norm.append(row["optim/grad_norm"])
            history.clip_coef.append(row["optim/clip_coef"])
            history.skipped.append(bool(row["optim/skipped"]))
            history.tokens = row["tokens"]
            if self.diverged:
                break
        tokens_per_step = rows[0]["tokens"] / rows[0]["step"]
        rows[-1]["perf/tokens_per_s"] = tokens_per_step * len(self._pending) / max(self._spent, 1e-9)
        history.tokens_per_s.append(rows[-1]["perf/tokens_per_s"])
        self._pending, self._spent = [], 0.0
        return rows

    def _deliver(self, rows: list[Row]) -> None:
        self.sink.rows(rows)
        for name, series in (("grad_norm", self.history.grad_norm), ("loss", self.history.loss)):
            kept = ~np.asarray(self.history.skipped)
            first = int(kept[: len(series) - len(rows)].sum())
            flags = flag_spikes(np.asarray(series)[kept], start=first)
            for row, spike in zip((r for r in rows if not r["optim/skipped"]), flags, strict=True):
                key = "optim/grad_norm" if name == "grad_norm" else "train/loss"
                if spike:
                    self.sink.event({"step": row["step"], "event": f"{name}_spike", "value": row[key]})
        for row in rows:
            if row["optim/skipped"]:
                self.sink.event({"step": row["step"], "event": "skipped_step", "value": row["optim/loss_scale"]})
        if self.diverged:
            bad = rows[-1]
            values = {key: bad[key] for key in ("train/loss", "optim/grad_norm", "optim/lr", "tokens")}
            self.sink.event({"step": bad["step"], "event": "nonfinite_step", **values})

    def _measure(self, validation: bool, probe: bool) -> Row:
        measured: Row = {}
        with autocast(self.step.device, self.step.precision):
            if validation:
                measured |= validate(self.model, self.eval_windows, self.plan.micro_batch_size, self.eval_bytes)
            if probe:
                measured |= probe_attention(self.model, self.probe_windows)
        history = self.history
        history.measured |= measured
        if probe:
            history.max_attn_logit = max(history.max_attn_logit, measured["attn/max_logit"])
        if validation and not measured["val/loss"] >= history.best.get("val/loss", float("inf")):
            history.best = {
                "val/loss": measured["val/loss"],
                "val/ppl": measured["val/ppl"],
                "step": len(history.loss),
            }
        return measured


def _due(step: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


def summarise(history: History, diverged: bool, unigram_entropy: float | None, warmup_steps: int) -> dict[str, Any]:
    """Verdict, final and best values and spike scores of a run, from what its loop measured."""
    kept = ~np.asarray(history.skipped, dtype=bool)
    loss, norm = (np.asarray(series)[kept] for series in (history.loss, history.grad_norm))
    spikes = {name: spike_score(series) for name, series in (("grad_norm", norm), ("loss", loss))}
    final = {} if diverged else dict(history.measured)
    judged = None
    if len(loss):
        judged = verdict(
            loss,
            norm,
            initial_val_loss=history.initial.get("val/loss"),
            final_val_loss=final.get("val/loss"),
            unigram_entropy=unigram_entropy,
            n_spikes=_spiky_steps(spikes),
            warmup_steps=warmup_steps,
        )
    steps = np.flatnonzero(kept) + 1
    finite_norm = norm[np.isfinite(norm)]
    last_loss = float(loss[-LAST:].mean()) if len(loss) else None
    rates = history.tokens_per_s[1:] or history.tokens_per_s  # the first flush holds warm-up and compilation
    return {
        "verdict": judged.verdict if judged else None,
        "reason": judged.reason if judged else "The run ended before its first step.",
        "first_bad_step": int(steps[judged.first_bad_step - 1]) if judged and judged.first_bad_step else None,
        "steps": len(history.loss),
        "tokens": history.tokens,
        "initial": history.initial,
        "final": {
            "train/loss": last_loss,
            "train/ppl": None if last_loss is None else perplexity(last_loss),
            **final,
        },
        "best": history.best,
        "max_attn_logit": history.max_attn_logit if history.initial else None,
        "spikes": {name: _spikes(score, steps) for name, score in spikes.items()},
        "grad_norm": {
            f"p{q}": float(np.percentile(finite_norm, q)) if len(finite_norm) else None for q in (50, 90, 99)
        },
        "clip_fraction": float(np.mean(np.asarray(history.clip_coef) < 1)) if history.clip_coef else None,
        "skipped_steps": int(sum(history.skipped)),
        "tokens_per_s": float(np.median(rates)) if rates else None,
    }


def _spiky_steps(spikes: Mapping[str, SpikeScore]) -> int | None:
    """Steps with a spike in any of the series; None where the run is too short for every one."""
    scored = [score for score in spikes.values() if score.score is not None]
    return len({int(i) for score in scored for i in score.indices}) if scored else None


def _spikes(score: SpikeScore, steps: np.ndarray) -> dict[str, Any]:
    return {
        "definition": score.name,
        "window": score.window,
        "threshold": score.threshold,
        "two_sided": score.two_sided,
        "score": score.score,
        "reason": score.reason,
        "n_spikes": score.n_spikes if score.score is not None else None,
        "n_scored": score.n_scored,
        "n_nonfinite": score.n_nonfinite,
        "resolution": score.resolution,
        "steps": [int(steps[i]) for i in score.indices],
    }
