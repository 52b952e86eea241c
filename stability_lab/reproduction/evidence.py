"""The evidence of a part: a few kilobytes of each run, or computed values.

A kept run is a small copy of the run's files in their own layout, so that code for runs reads it too. A computed value
has a name and is one number, or one number for each seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stability_lab.compare.run_record import RunRecord

# What tables and claims use.
_DEFINITIONS = ("olmo2", "olmo_core", "robust")
_MANIFEST = ("created", "device", "threads", "precision", "attention", "fingerprint")
_DATA = ("fingerprint", "first_batch", "last_batch", "validation", "unigram_entropy")
_LAYERS = ("act/rms/L", "attn/entropy/L")
_BEFORE = 20  # steps with which an injected one is compared
_LAST = 20  # steps at the end of a series that are averaged
FAILING = 15  # steps of which the mean loss leaves a level
# Measures of how runs fail: one that diverged has them as well.
_OF_FAILURES = ("ln_failing_lr/", "spike_events")


@dataclass(frozen=True)
class KeptRun:
    """A run of an arm in a setting at a learning rate (None: the experiment's own)."""

    arm: str
    setting: str
    lr: float | None
    seed: int
    record: RunRecord

    @property
    def place(self) -> str:
        """`arm`, or `arm@setting` if the part has settings."""
        return f"{self.arm}@{self.setting}" if self.setting else self.arm

    def metric(self, name: str) -> float | None:
        """A finite final or derived value; None if the run has none, or diverged and it is no measure of failures."""
        value = None if self.record.diverged and not name.startswith(_OF_FAILURES) else self.record.metric(name)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class PartEvidence:
    """`head` is the first line of a data file, see `datafile.py`. The rest is either runs or values."""

    head: Mapping[str, Any]
    runs: tuple[KeptRun, ...] = ()
    values: Mapping[str, float | list[float]] = field(default_factory=dict)


def small(record: RunRecord, injected: Sequence[int] = (), levels: Sequence[float] = ()) -> dict[str, Any]:
    """The kept part of a run's files, with the values that are derived from its series."""
    manifest, summary = record.manifest, record.summary
    data = manifest.get("data")
    scores = {
        signal: {name: _counts(record.score(signal, name)) for name in _DEFINITIONS} for signal in ("grad_norm", "loss")
    }
    kept = ("status", "verdict", "sensitivity", "steps", "tokens", "max_attn_logit", "clip_fraction", "tokens_per_s")
    return {
        "config": {"optimizer": {"lr": record.lr}, "seed": record.seed, "stabilizer": dict(record.stabilizer_options)},
        "manifest": {
            **{key: manifest.get(key) for key in _MANIFEST},
            "data": {key: data.get(key) for key in _DATA} if isinstance(data, Mapping) else {},
        },
        "summary": {
            **{key: summary.get(key) for key in kept},
            "initial": {"val/loss": record.initial("val/loss")},
            "final": {**_kept(summary.get("final") or {}), **_derived(record, injected, levels)},
            "scores": scores,
        },
    }


def by_delta(summary: Mapping[str, Any], delta: float) -> dict[str, Any]:
    """The summary of a run with its verdict by this D, if the run has one."""
    summary = dict(summary)
    if (verdict := (summary.get("sensitivity") or {}).get(f"{delta:g}")) is not None:
        summary["verdict"] = verdict
        summary["status"] = "diverged" if verdict == "diverged" else "completed"
    return summary


def _kept(final: Mapping[str, Any]) -> dict[str, Any]:
    """`final` without the values of single layers that no page shows."""
    return {name: value for name, value in final.items() if "/L" not in name or name.startswith(_LAYERS)}


def _counts(score: Mapping[str, Any]) -> dict[str, Any]:
    return {key: score.get(key) for key in ("score", "n_spikes", "n_scored", "window", "threshold")}


def _derived(record: RunRecord, injected: Sequence[int], levels: Sequence[float]) -> dict[str, float]:
    """Scalars from the series of a run; one that the run does not give is left out."""
    series = record.series("step", "optim/lr", "optim/grad_norm", "train/log_z_mean", "train/loss")
    norm, log_z, losses = series["optim/grad_norm"], series["train/log_z_mean"], series["train/loss"]
    found: dict[str, float] = {}
    n = len(norm)
    if n >= 40 and np.isfinite(norm).all() and (norm > 0).all():
        logs = np.log(norm)
        tenth = n // 10
        found["grad_level"] = float(logs[n // 2 :].mean())
        # From the second tenth on: the first holds the warm-up.
        found["grad_growth"] = float(np.median(logs[-tenth:]) - np.median(logs[tenth : 2 * tenth]))
        rows = np.flatnonzero(np.isin(series["step"], injected))
        jumps = [logs[row] - np.median(logs[row - _BEFORE : row]) for row in rows if row >= _BEFORE]
        if jumps:
            found["log_injected_ratio"] = float(np.mean(jumps))
    if n:
        found["spike_events"] = float(len(record.events("grad_norm_spike")))
    if n and np.isfinite(log_z).any():
        found["abs_log_z"] = abs(float(np.nanmean(log_z[-_LAST:])))
    if n and np.isfinite(losses).any():
        found["loss_peak"] = float(losses[np.isfinite(losses)].max())
    found |= _failing_rates(series["optim/lr"], losses, levels)
    final = record.summary.get("final") or {}
    streams = [float(final[key]) for key in sorted(final) if key.startswith("act/rms/L")]
    if streams and streams[0] > 0:
        found["rms_growth"] = streams[-1] / streams[0]
    logit = record.metric("max_attn_logit")
    if logit is not None and logit > 0:
        found["log10_max_attn_logit"] = math.log10(logit)
    speed = record.metric("tokens_per_s")
    if speed is not None and speed > 0:
        found["log_tokens_per_s"] = math.log(speed)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _failing_rates(lr: np.ndarray, losses: np.ndarray, levels: Sequence[float]) -> dict[str, float]:
    """`ln_failing_lr/LEVEL`, the logarithm of the rate at `failing_row`."""
    rows = {level: failing_row(losses, level) for level in levels}
    return {f"ln_failing_lr/{level:g}": math.log(lr[row]) for level, row in rows.items() if row is not None}


def failing_row(losses: np.ndarray, level: float) -> int | None:
    """The row at which the mean of the last 15 losses leaves `level` upwards for good, or the last row, where it never
    does; None where it never was below."""
    if losses.size < FAILING:
        return None
    means = np.convolve(np.nan_to_num(losses, nan=1e4, posinf=1e4), np.full(FAILING, 1 / FAILING), "valid")
    below = np.flatnonzero(means <= level)
    return min(int(below[-1]) + FAILING, losses.size - 1) if below.size else None
