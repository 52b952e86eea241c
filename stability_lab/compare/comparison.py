"""From runs to a comparison: one row for each arm in each setting, the checks behind it and what follows from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from stability_lab.compare.comparability import Check, checks, pairs_hold, repeated
from stability_lab.compare.contrasts import difference_by_seed
from stability_lab.compare.factorial import Factorial, factorials
from stability_lab.compare.grouping import LR, Cell, Grouping, group, seed_of
from stability_lab.compare.ladders import Ladder, ladders
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import Difference, Mean, family, t_interval
from stability_lab.config import ConfigError
from stability_lab.text import did_you_mean, number

# Preferred first: the definition of the first paper that every run of the table is long enough for.
DEFINITIONS = ("olmo2", "olmo_core", "robust")
DEGRADED_NATS, DEGRADED_LOGIT = 0.1, 1e4
# Speeds of runs that compute the same should not differ by more: beyond, the machine was busy with other work.
BUSY_RATIO = 1.25


@dataclass(frozen=True)
class SpikeRate:
    """Spikes over scored steps of all runs of a cell, in percent; `resolution` is what one spike counts."""

    signal: str
    definition: str
    score: float | None
    spikes: int
    scored: int
    resolution: float | None


@dataclass(frozen=True, eq=False)
class Row:
    """`metric` and what follows it are over the runs that finished without diverging; None where there is none."""

    cell: Cell
    is_baseline: bool
    metric: Mean | None
    perplexity: Mean | None
    best: Mean | None
    difference: Difference | None
    spikes: Mapping[str, SpikeRate]  # by signal
    max_attn_logit: float | None  # largest of all runs
    clip_fraction: float | None
    verdicts: tuple[str, ...]
    degraded: int
    tokens_per_s: float | None
    speed: float | None  # relative to the baseline
    memory_bytes: float | None
    memory: float | None  # relative to the baseline

    @property
    def p_holm(self) -> float | None:
        return self.difference.p_holm if self.difference else None


@dataclass(frozen=True, eq=False)
class Comparison:
    metric: str
    grouping: Grouping
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    paired: bool
    ladders: tuple[Ladder, ...]
    factorials: tuple[Factorial, ...]
    notes: tuple[str, ...]

    @property
    def busy(self) -> float | None:
        """Factor between tokens/s of runs that compute the same; None where it is small enough to trust them."""
        ratio = max((_speed_ratio(cell) for cell in self.grouping.cells), default=1.0)
        return ratio if ratio > BUSY_RATIO else None


def compare(
    runs: Sequence[RunRecord],
    metric: str = "val/loss",
    by: Sequence[str] = (),
    baseline: str | None = None,
    faults: Sequence[str] = (),
) -> Comparison:
    """`faults` are sentences on runs that could not be read, for the notes. ConfigError for a metric, key or baseline
    that no run has."""
    _check_metric(runs, metric)
    grouping = group(runs, by, baseline)
    found = checks(grouping)
    paired = pairs_hold(found)
    definition = _definition(runs)
    best = _best_losses(grouping, metric)
    rows = []
    for _, cells in grouping.settings():
        base = cells.get(grouping.baseline)
        for cell in cells.values():
            rows.append(_row(cell, base, metric, paired, definition, best[_family(cell)]))
    rows = [
        replace(row, difference=difference)
        for row, difference in zip(rows, family([row.difference for row in rows]), strict=True)
    ]
    comparison = Comparison(
        metric=metric,
        grouping=grouping,
        rows=tuple(rows),
        checks=tuple(found),
        paired=paired,
        ladders=tuple(ladders(grouping, metric, paired)),
        factorials=tuple(factorials(grouping, metric)),
        notes=(*grouping.notes, *_notes(grouping, rows, metric, paired), *(f"left out: {fault}" for fault in faults)),
    )
    if (ratio := comparison.busy) is None:
        return comparison
    note = (
        f"tokens/s of runs that compute the same differ by up to a factor of {ratio:.1f}, as on a busy machine: what "
        "an arm costs in time is not measured well here"
    )
    return replace(comparison, notes=(*comparison.notes, note))


def _check_metric(runs: Sequence[RunRecord], metric: str) -> None:
    if any(run.metric(metric) is not None for run in runs):
        return
    known = {name for run in runs for name in (run.summary.get("final") or {})}
    known |= {name for run in runs for name in run.summary if run.metric(name) is not None}
    if any(run.ended and not run.diverged for run in runs):
        raise ConfigError(f"--metric {metric}: no run has it: {did_you_mean(metric, known)}")


def _definition(runs: Sequence[RunRecord]) -> str:
    ended = [run for run in runs if run.ended and not run.diverged] or [run for run in runs if run.ended]
    for name in DEFINITIONS[:-1]:
        scores = [run.score("grad_norm", name).get("score") for run in ended]
        if scores and all(score is not None for score in scores):
            return name
    return DEFINITIONS[-1]


def _family(cell: Cell) -> tuple[Any, ...]:
    """Settings that differ in the learning rate alone have one best loss."""
    return tuple(value for key, value in cell.setting.items() if key != LR)


def _best_losses(grouping: Grouping, metric: str) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = defaultdict(lambda: math.inf)
    for cell in grouping.cells:
        for value in _values(cell.finite, metric):
            best[_family(cell)] = min(best[_family(cell)], value)
    return best


def _values(runs: Sequence[RunRecord], metric: str) -> list[float]:
    values = (run.metric(metric) for run in runs)
    return [value for value in values if value is not None and math.isfinite(value)]


def _row(cell: Cell, base: Cell | None, metric: str, paired: bool, definition: str, best: float) -> Row:
    values = _values(cell.finite, metric)
    mean = t_interval(values) if values else None
    is_loss = metric.endswith("/loss")
    bests = _values(cell.finite, f"best.{metric}")
    logits = [value for run in cell.ended if (value := run.metric("max_attn_logit")) is not None]
    clipped = [value for run in cell.ended if (value := run.metric("clip_fraction")) is not None]
    compared = base is not None and base is not cell
    return Row(
        cell=cell,
        is_baseline=base is cell,
        metric=mean,
        perplexity=_exp(mean) if mean and is_loss else None,
        best=t_interval(bests) if bests else None,
        difference=difference_by_seed(by_seed(cell, metric), by_seed(base, metric), paired)
        if compared and base
        else None,
        spikes={signal: _spike_rate(cell, signal, definition) for signal in ("grad_norm", "loss")},
        max_attn_logit=max(math.inf if math.isnan(x) else x for x in logits) if logits else None,
        clip_fraction=sum(clipped) / len(clipped) if clipped else None,
        verdicts=tuple(run.verdict or run.status for run in cell.ended),
        degraded=sum(_degraded(run, metric, best) for run in cell.finite),
        tokens_per_s=_median(cell, "tokens_per_s"),
        speed=_ratio(cell, base, "tokens_per_s"),
        memory_bytes=_median(cell, "perf/peak_memory_bytes"),
        memory=_ratio(cell, base, "perf/peak_memory_bytes"),
    )


def by_seed(cell: Cell, metric: str) -> dict[str, float]:
    """Finite values of the runs that count in a mean."""
    values = ((str(seed_of(run)), run.metric(metric)) for run in cell.finite)
    return {seed: value for seed, value in values if value is not None and math.isfinite(value)}


def _degraded(run: RunRecord, metric: str, best: float) -> bool:
    """Whether a finite loss is much worse than the best of its sweep, which the run itself could not know."""
    value, logit = run.metric(metric), run.metric("max_attn_logit")
    worse = metric.endswith("/loss") and value is not None and value > best + DEGRADED_NATS
    return worse or (logit is not None and logit > DEGRADED_LOGIT)


def _spike_rate(cell: Cell, signal: str, definition: str) -> SpikeRate:
    scores = [score for run in cell.ended if number((score := run.score(signal, definition)).get("score")) is not None]
    spikes, scored = (int(sum(number(score.get(key)) or 0 for score in scores)) for key in ("n_spikes", "n_scored"))
    rate = (100 * spikes / scored, 100 / scored) if scored else (None, None)
    return SpikeRate(signal, definition, rate[0], spikes, scored, rate[1])


def _median(cell: Cell, name: str) -> float | None:
    values = _values(cell.ended, name)
    return median(values) if values else None


def _ratio(cell: Cell, base: Cell | None, name: str) -> float | None:
    """Median over seeds of the ratio to the baseline's run of the same seed, else the ratio of the medians."""
    if base is None:
        return None
    own = {str(seed_of(run)): value for run in cell.ended if (value := run.metric(name))}
    other = {str(seed_of(run)): value for run in base.ended if (value := run.metric(name))}
    ratios = [own[seed] / other[seed] for seed in own if seed in other]
    if ratios:
        return median(ratios)
    return median(own.values()) / median(other.values()) if own and other else None


def _exp(mean: Mean) -> Mean:
    def exp(value: float | None) -> float | None:
        if value is None:
            return None
        try:
            return math.exp(value)
        except OverflowError:
            return math.inf

    return Mean(exp(mean.value) or 0.0, exp(mean.low), exp(mean.high), mean.n)


def _notes(grouping: Grouping, rows: Sequence[Row], metric: str, paired: bool) -> list[str]:
    notes = []
    cells = grouping.cells
    single = [row for row in rows if len(row.cell.ended) == 1]
    if single:
        which = "every row rests" if len(single) == len(rows) else f"{len(single)} of {len(rows)} rows rest"
        notes.append(
            f"{which} on one seed: no interval and no test is possible, and a difference may be chance; add seed=0,1,2"
        )
    unfinished = [run for cell in cells for run in cell.unfinished]
    if unfinished:
        states = ", ".join(sorted({run.status for run in unfinished}))
        notes.append(f"{len(unfinished)} runs have no result ({states}) and are left out: {_names(unfinished)}")
    diverged = [run for cell in cells for run in cell.diverged]
    if diverged:
        notes.append(
            f"{len(diverged)} runs diverged: they are counted, and no mean holds them, so that a mean beside diverged "
            f"runs is that of the seeds that survived: {_names(diverged)}"
        )
    if n := repeated(cells):
        notes.append(f"{n} runs repeat a seed of their group: the latest of each seed counts")
    bare = [run for cell in cells for run in cell.finite if not _values([run], metric)]
    if bare:
        notes.append(f"{len(bare)} runs have no finite {metric} and are in no mean: {_names(bare)}")
    compared = [row.difference for row in rows if row.difference]
    if any(difference.p is not None for difference in compared) and not paired:
        notes.append(
            "the runs are not paired (see the checks), so differences are tested between independent samples (Welch)"
        )
    elif any(difference.method == "welch" and difference.p is not None for difference in compared):
        notes.append("where arms have no seed in common, differences are tested between independent samples (Welch)")
    return notes


def _speed_ratio(cell: Cell) -> float:
    speeds = _values(cell.ended, "tokens_per_s")
    return max(speeds) / min(speeds) if speeds and min(speeds) > 0 else 1.0


def _names(runs: Sequence[RunRecord], most: int = 3) -> str:
    listed = ", ".join(run.name for run in runs[:most])
    return f"{listed} and {len(runs) - most} more" if len(runs) > most else listed


def finding(row: Row) -> str:
    """Say in a few words what the row's difference to the baseline shows."""
    if row.is_baseline:
        return "baseline"
    return "no runs to compare" if row.difference is None else words(row.difference)


def words(difference: Difference) -> str:
    if difference.identical:
        return "identical to the baseline"
    if difference.significant is None:
        return "one seed: no test"
    if difference.significant:
        return "lower" if difference.value < 0 else "higher"
    if difference.seeds_needed is None:
        return "not distinguishable; more than 1,000 seeds would be needed"
    more = max(1, difference.seeds_needed - difference.n)
    return f"not distinguishable with this budget; about {more} more seed{'s' if more > 1 else ''} would be needed"


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
        name = f"{metric.removesuffix('/loss')}/ppl"
        record |= _interval(name, row.perplexity) | _interval(f"best {name}", row.best and _exp(row.best))
    d = row.difference
    record |= {"difference": d and d.value, "difference low": d and d.low, "difference high": d and d.high}
    record |= {"p": d and d.p, "p (Holm)": d and d.p_holm, "test": d and d.method, "pairs": d and d.n}
    record |= {"seeds needed": d and d.seeds_needed, "finding": finding(row)}
    for signal, rate in row.spikes.items():
        record |= {f"{signal} spike definition": rate.definition, f"{signal} spike score": rate.score}
        record |= {f"{signal} spikes": rate.spikes, f"{signal} scored steps": rate.scored}
        record |= {f"{signal} spike resolution": rate.resolution}
    record |= {"largest attention logit": row.max_attn_logit, "clip fraction": row.clip_fraction}
    for verdict in ("stable", "spiky", "no_learning", "diverged"):
        record[verdict if verdict != "diverged" else "verdict diverged"] = row.verdicts.count(verdict)
    record |= {"degraded": row.degraded}
    record |= {"tokens/s": row.tokens_per_s, "relative tokens/s": row.speed}
    record |= {"peak memory bytes": row.memory_bytes, "relative memory": row.memory}
    record |= {"not comparable": ", ".join(c.name for c in comparison.checks if c.same is False and c.spoils) or None}
    return record


def _interval(name: str, mean: Mean | None) -> dict[str, Any]:
    return {name: mean and mean.value, f"{name} low": mean and mean.low, f"{name} high": mean and mean.high}
