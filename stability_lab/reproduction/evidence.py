"""What the verdicts of a part rest on: a few kilobytes a run, one JSON object a line, first a line on the whole part.

A line of a run is a small copy of its files in their own layout, so that what reads runs elsewhere reads it too. A line
of computed values maps names to a number, or to one number a seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stability_lab.analysis.runs import RunRecord
from stability_lab.config import ConfigError

# Of the columns `final` and of the gradient norm's definitions, what tables and claims use.
_DEFINITIONS = ("olmo2", "olmo_core", "robust")
_MANIFEST = ("created", "device", "threads", "precision", "attention", "fingerprint")
_DATA = ("fingerprint", "first_batch", "last_batch", "validation")
_LAYERS = ("act/rms/L", "attn/entropy/L")
_BEFORE = 20  # steps with which an injected one is compared
_LAST = 20  # steps whose mean stands for the end of a series


@dataclass(frozen=True)
class Run:
    """A run of an arm in a setting at a learning rate (None: the experiment's own)."""

    arm: str
    setting: str
    lr: float | None
    seed: int
    record: RunRecord

    def metric(self, name: str) -> float | None:
        """A finite final or derived value; None where the run has none, or diverged."""
        value = None if self.record.diverged else self.record.metric(name)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Evidence:
    """`head`: name, part, scale, commands, versions, seconds, date. Either runs or values."""

    head: Mapping[str, Any]
    runs: tuple[Run, ...] = ()
    values: Mapping[str, float | list[float]] = field(default_factory=dict)


def file_name(name: str, part: str, scale: str) -> str:
    return f"{name}_{part}_{scale}.jsonl"


def small(record: RunRecord, injected: Sequence[int] = ()) -> dict[str, Any]:
    """The part of a run's files that is kept, with what is derived from its series."""
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
            "final": {**_kept(summary.get("final") or {}), **_derived(record, injected)},
            "scores": scores,
        },
    }


def write(path: Path, evidence: Evidence, kept: Sequence[Mapping[str, Any]] = ()) -> None:
    """Replace `path`; `kept` are the runs' `small` dicts, in the order of `evidence.runs`."""
    lines: list[dict[str, Any]] = [dict(evidence.head)]
    for run, content in zip(evidence.runs, kept, strict=True):
        lines.append({"arm": run.arm, "setting": run.setting, "lr": run.lr, "seed": run.seed, **content})
    if evidence.values:
        lines.append({"values": dict(evidence.values)})
    text = "".join(json.dumps(_words(line), sort_keys=True, allow_nan=False) + "\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error


def read(path: Path, delta: float = 1.0) -> Evidence:
    """ConfigError where the file is missing or damaged. `delta` is the D by which a run counts as diverged."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        head, *rest = (dict(line) for line in lines)
        values = {name: value for line in rest if "values" in line for name, value in line["values"].items()}
        runs = tuple(_run(line, path, delta) for line in rest if "arm" in line)
        return Evidence(head, runs, values)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}): run the part again") from error


def _run(line: Mapping[str, Any], path: Path, delta: float) -> Run:
    record = RunRecord(path, line["config"], line["manifest"], by_delta(line["summary"], delta))
    return Run(line["arm"], line["setting"], line["lr"], line["seed"], record)


def by_delta(summary: Mapping[str, Any], delta: float) -> dict[str, Any]:
    """The summary of a run with the verdict by this D, where the run says it."""
    summary = dict(summary)
    if (verdict := (summary.get("sensitivity") or {}).get(f"{delta:g}")) is not None:
        summary["verdict"] = verdict
        summary["status"] = "diverged" if verdict == "diverged" else "completed"
    return summary


def _kept(final: Mapping[str, Any]) -> dict[str, Any]:
    """Of a layer's own values only what pages show."""
    return {name: value for name, value in final.items() if "/L" not in name or name.startswith(_LAYERS)}


def _counts(score: Mapping[str, Any]) -> dict[str, Any]:
    return {key: score.get(key) for key in ("score", "n_spikes", "n_scored", "window", "threshold")}


def _derived(record: RunRecord, injected: Sequence[int]) -> dict[str, float]:
    """Scalars of the series of a run, each left out where the run does not give it."""
    series = record.series("step", "optim/grad_norm", "train/log_z_mean", "train/loss")
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


def _words(value: Any) -> Any:
    """JSON has no NaN; `analysis.runs.number` reads these words back."""
    if isinstance(value, Mapping):
        return {str(key): _words(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_words(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
