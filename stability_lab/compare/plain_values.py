"""A comparison as plain values, for JSON and CSV."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stability_lab.compare.comparison import Comparison, Row, exp, finding
from stability_lab.compare.statistics import Mean


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison as plain values with full precision; what is undefined is None."""
    grouping = comparison.grouping
    return {
        "metric": comparison.metric,
        "by": list(grouping.by),
        "baseline": grouping.baseline,
        "arms": list(grouping.arms),
        "setting": list(grouping.setting),
        "paired": comparison.paired,
        "tests": comparison.tests,
        "findings": comparison.findings,
        "rows": [flat(row, comparison) for row in comparison.rows],
        "checks": [
            {"name": check.name, "same": check.same, "detail": check.detail, "spoils": list(check.spoils)}
            for check in comparison.checks
        ],
        "learning_rates": [asdict(ladder) for ladder in comparison.ladders],
        "factorials": [asdict(factorial) for factorial in comparison.factorials],
        "notes": list(comparison.notes),
    }


def flat(row: Row, comparison: Comparison) -> dict[str, Any]:
    """A row for CSV: one value a column, the same columns in each row."""
    cell, metric = row.cell, comparison.metric
    record: dict[str, Any] = {**cell.setting, "arm": cell.arm}
    record |= {
        "n": row.metric.n if row.metric else 0,
        "diverged": len(cell.diverged),
        "unfinished": len(cell.unfinished),
    }
    record |= {"seeds": " ".join(str(run.seed) for run in cell.ended)}
    for name, mean in {metric: row.metric, f"best {metric}": row.best}.items():
        record |= _interval(name, mean)
    if metric.endswith("/loss"):
        name = comparison.perplexity_name
        record |= _interval(name, row.perplexity) | _interval(f"best {name}", row.best and exp(row.best))
    d = row.difference
    record |= {"difference": d and d.value, "difference low": d and d.low, "difference high": d and d.high}
    record |= {"p": d and d.p, "p (Holm)": d and d.p_holm, "test": d and d.method, "pairs": d and d.n}
    low, high = d.seeds_range or (None, None) if d else (None, None)
    record |= {"tests": d and d.tests, "new seeds low": low, "new seeds high": high, "finding": finding(row)}
    for signal, rate in row.spikes.items():
        record |= {f"{signal} spike definition": rate.definition, f"{signal} spike score": rate.score}
        record |= {f"{signal} spikes": rate.spikes, f"{signal} scored steps": rate.scored}
        record |= {f"{signal} spike resolution": rate.resolution}
    record |= {"largest attention logit": row.max_attn_logit, "clip fraction": row.clip_fraction}
    for verdict in ("stable", "spiky", "no_learning", "undecided", "diverged"):
        record[verdict if verdict != "diverged" else "verdict diverged"] = row.verdicts.count(verdict)
    record |= {"degraded": row.degraded}
    record |= {"tokens/s": row.tokens_per_s, "relative tokens/s": row.speed}
    record |= {"memory bytes": row.memory_bytes, "relative memory": row.memory}
    record |= {"not comparable": ", ".join(c.name for c in comparison.checks if c.same is False and c.spoils) or None}
    return record


def _interval(name: str, mean: Mean | None) -> dict[str, Any]:
    return {name: mean and mean.value, f"{name} low": mean and mean.low, f"{name} high": mean and mean.high}
