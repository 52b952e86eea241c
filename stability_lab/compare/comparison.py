"""From runs to a comparison: one row for each arm in each setting, the checks behind it and what follows from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from stability_lab.compare.comparability import Check, checks, pairs_hold, repeated
from stability_lab.compare.contrasts import Contrast, differences
from stability_lab.compare.costs import memory_bytes, speed_ratio, spread_of_speed, warming_up
from stability_lab.compare.factorial import Factorial, factorials
from stability_lab.compare.grouping import LR, Cell, Grouping, group, setting_text
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
    notes: tuple[str, ...] = ()
    tests: int = 0  # of differences, sensitivities, gains and effects together
    findings: int = 0  # of which so many are significant
    busy: float | None = None  # factor between tokens/s of runs that compute the same, where it is too large

    @property
    def perplexity_name(self) -> str:
        """`val/ppl` of the metric `val/loss`, and `val/masked_ppl` where runs have that."""
        split = self.metric.removesuffix("/loss")
        masked = any(run.metric(f"{split}/masked_ppl") is not None for row in self.rows for run in row.cell.finite)
        return f"{split}/masked_ppl" if masked else f"{split}/ppl"


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
    return compared(grouping, checks(grouping), metric, faults)


def compared(grouping: Grouping, found: Sequence[Check], metric: str, faults: Sequence[str] = ()) -> Comparison:
    """`compare` of runs that are grouped and checked."""
    paired = pairs_hold(found)
    definition = _definition([run for cell in grouping.cells for run in cell.runs])
    best = _best_losses(grouping, metric)
    tests = _tests(grouping, metric, paired)
    first = warming_up(grouping.cells)
    busy = max((spread_of_speed(cell, first) for cell in grouping.cells), default=1.0)
    rows: list[Row] = []
    for _, cells in grouping.settings():
        base = cells.get(grouping.baseline)
        rows += [_row(c, base, metric, tests.get(id(c)), definition, best[_family(c)], first) for c in cells.values()]
    comparison = _in_one_family(
        Comparison(
            metric=metric,
            grouping=grouping,
            rows=tuple(rows),
            checks=tuple(found),
            paired=paired,
            ladders=tuple(ladders(grouping, metric, paired)),
            factorials=tuple(factorials(grouping, metric, paired)),
            busy=busy if busy > BUSY_RATIO else None,
        )
    )
    notes = [*grouping.notes, *_notes(comparison), *(f"left out: {fault}" for fault in faults)]
    return replace(comparison, notes=tuple(notes))


def _tests(grouping: Grouping, metric: str, paired: bool) -> dict[int, Difference | None]:
    """By the id of its cell: each arm minus the baseline, in each setting that both have."""
    values = {id(cell): cell.values(metric) for cell in grouping.cells}
    tests: dict[int, Difference | None] = {}
    for arm in grouping.arms:
        settings = [cells for _, cells in grouping.settings() if arm in cells and grouping.baseline in cells]
        if arm == grouping.baseline:
            continue
        contrasts = []
        for cells in settings:
            beside = (values[id(cell)] for name, cell in cells.items() if name not in (arm, grouping.baseline))
            contrasts.append(Contrast((values[id(cells[arm])], values[id(cells[grouping.baseline])]), tuple(beside)))
        found = differences(contrasts, paired)
        tests |= {id(cells[arm]): test for cells, test in zip(settings, found, strict=True)}
    return tests


def _in_one_family(comparison: Comparison) -> Comparison:
    """Holm's rule over every test of the report. A gain that stands in the table of losses is no second test."""
    rows, ladders = comparison.rows, comparison.ladders
    effects = [effect for factorial in comparison.factorials for effect in factorial.effects]
    in_table = [_row_of_gain(ladder, rows) for ladder in ladders]
    tests = [*(row.difference for row in rows), *(ladder.difference for ladder in ladders)]
    tests += [ladder.gain if at is None else None for ladder, at in zip(ladders, in_table, strict=True)]
    tests += [effect.difference for effect in effects]
    found = family(tests)
    corrected = iter(found)
    rows = tuple(replace(row, difference=next(corrected)) for row in rows)
    changes, gains = [next(corrected) for _ in ladders], [next(corrected) for _ in ladders]
    by_effect = {id(effect): next(corrected) for effect in effects}
    return replace(
        comparison,
        rows=rows,
        ladders=tuple(
            replace(ladder, difference=change, gain=gain if at is None else rows[at].difference)
            for ladder, change, gain, at in zip(ladders, changes, gains, in_table, strict=True)
        ),
        factorials=tuple(
            replace(f, effects=tuple(replace(effect, difference=by_effect[id(effect)]) for effect in f.effects))
            for f in comparison.factorials
        ),
        tests=sum(one is not None and one.p is not None for one in found),
        findings=sum(one is not None and bool(one.significant) for one in found),
    )


def _row_of_gain(ladder: Ladder, rows: Sequence[Row]) -> int | None:
    """The row whose difference is the ladder's gain: that of one learning rate for both."""
    if ladder.tuned is None or ladder.tuned[0] != ladder.tuned[1]:
        return None
    setting = {**ladder.setting, LR: ladder.tuned[0]}
    return next(i for i, row in enumerate(rows) if row.cell.arm == ladder.arm and row.cell.setting == setting)


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


def _row(
    cell: Cell,
    base: Cell | None,
    metric: str,
    difference: Difference | None,
    definition: str,
    best: float,
    first: frozenset[int],
) -> Row:
    values = _values(cell.finite, metric)
    mean = t_interval(values) if values else None
    is_loss = metric.endswith("/loss")
    bests = _values(cell.finite, f"best.{metric}")
    logits = [value for run in cell.ended if (value := run.metric("max_attn_logit")) is not None]
    speeds = _values(cell.ended, "tokens_per_s")
    memory, of_base = memory_bytes(cell), memory_bytes(base) if base else None
    clipped = [value for run in cell.ended if (value := run.metric("clip_fraction")) is not None]
    return Row(
        cell=cell,
        is_baseline=base is cell,
        metric=mean,
        perplexity=exp(mean) if mean and is_loss else None,
        best=t_interval(bests) if bests else None,
        difference=difference,
        spikes={signal: _spike_rate(cell, signal, definition) for signal in ("grad_norm", "loss")},
        max_attn_logit=max(math.inf if math.isnan(x) else x for x in logits) if logits else None,
        clip_fraction=sum(clipped) / len(clipped) if clipped else None,
        verdicts=tuple(run.outcome for run in cell.ended),
        degraded=sum(_degraded(run, metric, best) for run in cell.finite),
        tokens_per_s=median(speeds) if speeds else None,
        speed=speed_ratio(cell, base, first),
        memory_bytes=memory,
        memory=memory / of_base if memory and of_base else None,
    )


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


def exp(mean: Mean) -> Mean:
    def exp(value: float | None) -> float | None:
        if value is None:
            return None
        try:
            return math.exp(value)
        except OverflowError:
            return math.inf

    return Mean(exp(mean.value) or 0.0, exp(mean.low), exp(mean.high), mean.n)


def _notes(comparison: Comparison) -> list[str]:
    rows, cells, metric = comparison.rows, comparison.grouping.cells, comparison.metric
    notes = _notes_on_tests(comparison)
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
    if (ratio := comparison.busy) is not None:
        notes.append(
            f"tokens/s of runs that compute the same differ by up to a factor of {ratio:.1f}, as on a busy machine: "
            "what an arm costs in time is not measured well here"
        )
    return notes


def _notes_on_tests(comparison: Comparison) -> list[str]:
    """How many tests the report has, and which kind where."""
    n, k = comparison.tests, comparison.findings
    if not n:
        return []
    notes = [
        f"findings by Holm's rule: {k} of {n} tests (differences, LR sensitivities, gains at the best rates, effects); "
        "the chance that one or more of them come from chance alone is at most 5%, and without the rule "
        f"{0.05 * n:.2g} would be expected"
    ]
    by_method: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.difference is not None and row.difference.p is not None:
            where = setting_text(row.cell.setting)
            by_method.setdefault(row.difference.method, []).append(where)
    if not comparison.paired:
        notes.append("the runs are not paired (see the checks), so that seeds are not taken out: Welch's test")
    elif "welch" in by_method:
        which = [", ".join(dict.fromkeys(filter(None, by_method.get(kind, [])))) for kind in ("paired", "welch")]
        notes.append(
            "seeds are taken out where they explain variance (F test over all arms, 5%)"
            + (f": {which[0]}" if which[0] else "")
            + f"; elsewhere differences are tested as of independent samples (Welch){': ' * bool(which[1])}{which[1]}"
        )
    return notes


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
    return f"not distinguishable with this budget{new_seeds(difference, '; ')}"


def new_seeds(difference: Difference, before: str) -> str:
    """How many seeds of their own would find a difference of this size; empty where that would be a guess."""
    if (ends := difference.seeds_range) is None:
        return ""
    return (
        f"{before}a difference of this size, were it the true one, takes {ends[0]} to {ends[1]} new seeds tested alone"
    )
