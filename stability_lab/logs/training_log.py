"""Anybody's training log as the series that the judge takes: columns, steps, what was left out and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.judge.column_names import NAMES, spelling
from stability_lab.judge.log import Log, stride_of
from stability_lab.logs.columns import (
    WORDS,
    asked_for,
    candidates,
    found,
    named_for,
    nothing_known,
    words_in,
)
from stability_lab.logs.sources import TRAINER_STATE, Numbers, Source, logs_in, read_source
from stability_lab.logs.splits import (
    NOTHING_ASKED,
    Options,
    TrainingRows,
    by_restarts,
    by_runs,
    refuse_validation_alone,
    rows_with,
    without_validation,
)
from stability_lab.logs.steps import ALIKE_NATS, Steps, Timeline, noise_of, step_column, timeline
from stability_lab.text import many, shown

Values = NDArray[np.float64]

_SIGNALS = ("loss", "grad_norm")


@dataclass(frozen=True, eq=False)
class LogSeries:
    """The values of one column, in strictly increasing order of their steps."""

    column: str
    step: NDArray[np.int64]
    value: NDArray[np.float64]
    step_column: str | None


@dataclass(frozen=True, eq=False)
class NamedLog:
    """A log and where it comes from; `columns` names the column that was taken for each thing."""

    source: Path
    run: str | None
    format: str
    n_rows: int
    log: Log
    columns: dict[str, str]
    notes: list[str]
    left_out: dict[str, int] = field(default_factory=dict)  # rows, by reason


def read_logs(path: Path, options: Options = NOTHING_ASKED) -> list[NamedLog]:
    """The log in `path`, or each of several runs in it, with columns by common names unless they are given.

    ConfigError where one cannot be read, or where it is not certain which rows are one run's training.
    """
    asked = [name for name in (options.loss, options.grad_norm) if name is not None]
    return [log for source in _sources(path, asked) for log in _logs(source, options)]


def read_metrics(
    path: Path, metric: str, options: Options = NOTHING_ASKED
) -> list[tuple[LogSeries, Source, list[str]]]:
    """One column of any meaning, for its spike scores alone, of each run in `path`; what is to be said of it."""
    return [found for source in _sources(path, [metric]) for found in _metrics(source, metric, options)]


def _metrics(source: Source, metric: str, options: Options) -> Iterator[tuple[LogSeries, Source, list[str]]]:
    column = asked_for(source, "metric", metric)
    for part in _runs(source, [column], options):
        run, notes = part.source, [*part.source.notes, *_said(part)]
        times = timeline(run, [column], options.step)
        notes += [*_left_out(run, [column]), *times.notes]
        numbers = run.numbers(column)
        steps = times.steps_with([numbers])
        series = LogSeries(column, steps, _on(run, steps, times, column, notes).value, times.column)
        if (stride := stride_of(series.step)) != 1:
            notes.append(f"One value every {stride:,} steps: windows count values, not steps.")
        yield series, run, notes


def _runs(source: Source, signals: Sequence[str], options: Options) -> list[TrainingRows]:
    """The training of each run in a source: without rows of validation, by a column that names runs, by restarts."""
    whole = without_validation(source, signals, options.split)
    rows = np.flatnonzero(rows_with(whole.source, signals))
    steps = step_column(whole.source, rows, options.step, [])
    named = by_runs(whole.source, signals, steps, options.runs_by)
    parts = []
    for run in named:
        own = step_column(run, np.flatnonzero(rows_with(run, signals)), options.step, [])
        parts += by_restarts(run, signals, replace(options, step=own))
    # What was left out of a table with several runs is said of each.
    return [TrainingRows(part, whole.left_out) for part in parts]


def _said(part: TrainingRows) -> list[str]:
    return [
        f"{many(rows, 'row')} {why} {'is' if rows == 1 else 'are'} left out." for why, rows in part.left_out.items()
    ]


def _sources(path: Path, asked: Sequence[str]) -> list[Source]:
    """What `path` holds, one run each; only those that have the columns of just the name that was asked for."""
    sources = [part for log in logs_in(path) for part in _by_run(read_source(log), asked)]
    for name in asked:
        exact = [source for source in sources if name in source.columns]
        if exact and len(sources) > 1:
            sources = exact
    return sources


def _by_run(source: Source, asked: Sequence[str]) -> list[Source]:
    """The runs of a chart that W&B exported for several, with columns `RUN - METRIC`; or the source as it is."""
    wanted = {*NAMES["loss"], *NAMES["grad_norm"], *(spelling(name.rpartition(" - ")[2]) for name in asked)}
    columns: dict[str, list[str]] = {}
    for column in source.columns:
        run, dash, _ = column.rpartition(" - ")
        if dash:
            columns.setdefault(run, []).append(column)
    runs = [run for run, own in columns.items() if any(spelling(c.rpartition(" - ")[2]) in wanted for c in own)]
    if len(runs) < 2:
        return [source]
    of_all = [column for column in source.columns if " - " not in column]
    parts = []
    for run in runs:
        rows = source.table[columns[run]].notna().any(axis=1)
        own = source.table.loc[rows, [*of_all, *columns[run]]]
        parts.append(Source(source.path, source.format, own, source.notes, run))
    return parts


def _logs(source: Source, options: Options) -> Iterator[NamedLog]:
    notes: list[str] = []
    columns: dict[str, str] = {}
    asked = {"loss": options.loss, "grad_norm": options.grad_norm}
    for role in _SIGNALS:
        name = asked[role]
        column = found(source, role, notes) if name is None else asked_for(source, role, name)
        if column is not None and column not in columns.values():
            columns[role] = column
    if not columns:
        raise nothing_known(source)
    signals = dict(columns)
    for role, column in signals.items():
        other = next(name for name in _SIGNALS if name != role)
        if asked[role] is not None and column in named_for(source, other):
            notes.append(f"{shown(column)} is judged as a {WORDS[role]}, but its name is that of a {WORDS[other]}.")
    if not any((*asked.values(), options.split)):
        refuse_validation_alone(source, list(signals.values()))
    for part in _runs(source, list(signals.values()), options):
        yield _log(part, signals, options, [*part.source.notes, *notes])


def _log(part: TrainingRows, signals: dict[str, str], options: Options, notes: list[str]) -> NamedLog:
    source = part.source
    extra = {
        role: taken[0] for role in NAMES if role not in (*_SIGNALS, "step") and (taken := candidates(source, role))
    }
    own = {role: column for role, column in signals.items() if source.numbers(column).known.any()}
    columns = dict(own)
    times = timeline(source, list(own.values()), options.step)
    notes += [*_said(part), *_left_out(source, list(own.values())), *times.notes]
    if times.column is not None:
        columns["step"] = times.column
    numbers = {role: source.numbers(column) for role, column in own.items()}
    steps = times.steps_with(list(numbers.values()))
    fields: dict[str, Any] = dict.fromkeys(_SIGNALS)
    for role, column in own.items():
        fields[role], has = _on(source, steps, times, column, notes)
        if not has.all():
            fields[f"no_{role}"] = ~has
    for role, column in extra.items():
        values, has = times.at(steps, source.numbers(column, role), everywhere=True)
        if has.any():
            columns[role] = column
            fields[role] = values > 0 if role == "skipped" else values
    log = Log(step=steps, **fields)
    left_out = {**part.left_out, "without a value": int(np.count_nonzero(~rows_with(source, list(own.values()))))}
    left_out["of an earlier attempt, or of a step that has a later value"] = times.all_rows - len(log)
    kept = {why: rows for why, rows in left_out.items() if rows > 0}
    return NamedLog(source.path, source.run, source.format, len(source.table), log, columns, notes, kept)


def _on(source: Source, steps: NDArray[np.int64], times: Timeline, column: str, notes: list[str]) -> Numbers:
    """The values of a signal at `steps`, which hold all of its own.

    ConfigError where many of them have several values, or a loss has some that no noise explains.
    """
    numbers = source.numbers(column)
    found = times.at(steps, numbers)
    known = numbers.known[times.rows]
    _refuse_several(source, column, times.steps[known], numbers.value[times.rows][known], found.value, steps)
    if repeated := int(np.count_nonzero(known)) - int(np.count_nonzero(found.known)):
        notes.append(f"{shown(column)}: {many(repeated, 'value')} had a step that a later one has too, which counts.")
    return found


def _refuse_several(source: Source, column: str, at: Steps, values: Values, last: Values, steps: Steps) -> None:
    """ConfigError where many `steps` have other `values` than their `last`, or a loss has one that is no noise."""
    last_of = last[np.searchsorted(steps, at)]
    other = np.flatnonzero(~np.isclose(values, last_of, equal_nan=True))
    finite = other[np.isfinite(values[other]) & np.isfinite(last_of[other])]
    apart = np.abs(values[finite] - last_of[finite])
    n = np.unique(at[other]).size
    far = column in named_for(source, "loss") and (apart > max(ALIKE_NATS, 6 * noise_of(last))).any()
    if n > max(1, steps.size // 10) or far:
        widest = finite[np.argmax(apart)] if finite.size else other[0]
        have = "has" if n == 1 else "have"
        raise ConfigError(
            f"{source.name}: {n:,} of {many(steps.size, 'step')} {have} several values of {shown(column)}, such as "
            f"{values[widest]:.4g} and {last_of[widest]:.4g} at {at[widest]:,}: {source.apart}"
        )


def _left_out(source: Source, columns: Sequence[str]) -> list[str]:
    """What to say of rows and cells without a value."""
    known = np.array([source.numbers(column).known for column in columns])
    notes = [note for column in columns if (note := words_in(source, column))]
    if none := int(np.count_nonzero(~known.any(axis=0))):
        what = " and no ".join(shown(column) for column in columns)
        notes.append(f"{none:,} of {many(len(source.table), 'row')} {'has' if none == 1 else 'have'} no {what}.")
    if source.format == TRAINER_STATE:  # it ends with rows of the evaluation and of a summary
        return notes
    return notes + [note for column, has in zip(columns, known, strict=True) if (note := _end(column, has))]


def _end(column: str, has: NDArray[np.bool_]) -> str | None:
    """Some writers make an empty cell of NaN, and then the end of a diverged run just looks empty."""
    filled = np.flatnonzero(has)
    tail = has.size - 1 - int(filled[-1])
    usual = int(np.diff(filled).max()) - 1 if filled.size > 1 else 0
    if tail <= max(usual, 1):
        return None
    return f"The last {tail:,} rows have no {shown(column)}: if it was NaN there, the file does not show it."
