"""Anybody's training log as the series that the judge takes: columns, steps, what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.analysis.sources import Row, Source, read_source, shown
from stability_lab.config import ConfigError, did_you_mean
from stability_lab.judge.log import Log
from stability_lab.judge.names import NAMES, spelling

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
_LISTED = 30


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one column, in strictly increasing order of their steps."""

    column: str
    step: NDArray[np.int64]
    value: NDArray[np.float64]
    step_column: str | None


@dataclass(frozen=True, eq=False)
class NamedLog:
    """A log and where it comes from.

    `apart` holds the gradient norm where it is logged at other steps than the loss; then `log` has only the loss.
    `columns` names the column that was taken for each thing.
    """

    source: Path
    format: str
    n_rows: int
    log: Log
    apart: Log | None
    columns: dict[str, str]
    notes: list[str]


def read_log(path: Path, *, loss: str | None = None, grad_norm: str | None = None, step: str | None = None) -> NamedLog:
    """The log in `path`, with columns found by common names unless they are given; ConfigError where that fails."""
    source = read_source(path)
    notes = list(source.notes)
    columns: dict[str, str] = {}
    series: dict[str, Series] = {}
    for role, asked in (("loss", loss), ("grad_norm", grad_norm)):
        column = _named(source, role, asked) if asked is not None else _found(source, role, notes)
        if column is not None:
            columns[role] = column
            series[role] = _series(source, column, step, notes)
    if not series:
        option = "--loss COLUMN, --grad-norm COLUMN or --metric COLUMN"
        raise ConfigError(f"{shown(path)} has no known name of a loss or a gradient norm: {option}; {_there(source)}")
    # Several columns may say the same of the rows and the steps.
    notes = list(dict.fromkeys(notes))
    first = next(iter(series.values()))
    if first.step_column is not None:
        columns["step"] = first.step_column
    together = len({tuple(s.step.tolist()) for s in series.values()}) == 1
    extra = _extra(source, columns, first, step)
    apart = None
    if together:
        log = Log(step=first.step, loss=_value(series, "loss"), grad_norm=_value(series, "grad_norm"), **extra)
    else:
        log = Log(step=first.step, loss=first.value, grad_norm=None, **extra)
        norm = series["grad_norm"]
        apart = Log(step=norm.step, loss=None, grad_norm=norm.value, **_extra(source, columns, norm, step))
        notes.append("Loss and gradient norm are logged at different steps, so each is judged by itself.")
    return NamedLog(path, source.format, len(source.rows), log, apart, columns, notes)


def read_metric(path: Path, metric: str, *, step: str | None = None) -> tuple[Series, Source, list[str]]:
    """One column of any meaning, for its spike scores alone; its source, and what is to be said of it."""
    source = read_source(path)
    notes = list(source.notes)
    series = _series(source, _named(source, "metric", metric), step, notes)
    if (stride := stride_of(series.step)) != 1:
        notes.append(f"One value every {stride:,} steps: windows count values, not steps.")
    return series, source, notes


def _keys(name: str) -> set[str]:
    """A chart exported from W&B calls its column `RUN - METRIC`."""
    return {spelling(name), spelling(name.rsplit(" - ", 1)[-1])}


def _there(source: Source) -> str:
    names = source.columns
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"its columns are {', '.join(map(shown, names[:_LISTED]))}{more}"


def _candidates(source: Source, role: str) -> Iterator[str]:
    columns = [(column, _keys(column)) for column in source.columns]
    for name in NAMES[role]:
        for column, keys in columns:
            if name in keys and any(number(row.get(column)) is not None for row in source.rows):
                yield column


def _found(source: Source, role: str, notes: list[str]) -> str | None:
    candidates = list(dict.fromkeys(_candidates(source, role)))
    if len(candidates) > 1:
        others = ", ".join(shown(c) for c in candidates[1:6])
        option = f"--{role.replace('_', '-')}"
        notes.append(f"The {WORDS[role]} is {shown(candidates[0])}; {option} takes another, such as {others}.")
    return candidates[0] if candidates else None


def _named(source: Source, role: str, asked: str) -> str:
    columns = source.columns
    option = f"--{role.replace('_', '-')}={shown(asked)}"
    column = asked if asked in columns else next((c for c in columns if spelling(asked) in _keys(c)), None)
    if column is None:
        guess = did_you_mean(asked, columns)
        hint = shown(guess) if guess.startswith("did you mean") else _there(source)
        raise ConfigError(f"{option}: {shown(source.path)} has no such column; {hint}")
    if not any(number(row.get(column)) is not None for row in source.rows):
        raise ConfigError(f"{option}: the column {shown(column)} of {shown(source.path)} holds no number")
    return column


def number(cell: Any) -> float | None:
    """A cell's value; None for an empty cell or a word. NaN and infinities are values, also as words."""
    try:
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf
    except (TypeError, ValueError):
        return None


def _series(source: Source, column: str, step: str | None, notes: list[str]) -> Series:
    filled = [(row, value) for row in source.rows if (value := number(row.get(column))) is not None]
    if len(filled) < len(source.rows):
        notes.append(f"{len(source.rows) - len(filled):,} of {len(source.rows):,} rows have no {shown(column)}.")
        _warn_of_end(source.rows, column, notes)
    step_column = _step_column(source, filled, step)
    if step_column is None:
        notes.append("No step column was found: rows are counted as steps (--step COLUMN names one).")
        return Series(column, np.arange(1, len(filled) + 1), np.array([value for _, value in filled]), None)
    known = [(at, value) for row, value in filled if (at := number(row.get(step_column))) is not None]
    if len(known) < len(filled):
        missing = len(filled) - len(known)
        notes.append(f"{missing:,} values of {shown(column)} have no {shown(step_column)} and are left out.")
    steps, values = (np.array(part, dtype=np.float64) for part in zip(*known, strict=True))
    wrong = steps[~(np.isfinite(steps) & (np.abs(steps) < 2**53) & (steps == np.floor(steps)))]
    if wrong.size:
        raise ConfigError(
            f"{shown(source.path)}: the step column {shown(step_column)} holds {wrong[0]:g}, which is no whole number; "
            "--step COLUMN names another"
        )
    kept, note = _in_order(steps.astype(np.int64))
    if note is not None:
        notes.append(f"{shown(column)}: {note}.")
    return Series(column, steps.astype(np.int64)[kept], values[kept], step_column)


def _step_column(source: Source, filled: Sequence[tuple[Row, float]], asked: str | None) -> str | None:
    """The named column, or the first known one that has a value in at least half of the rows."""
    if asked is not None:
        column = _named(source, "step", asked)
        if any(number(row.get(column)) is not None for row, _ in filled):
            return column
        raise ConfigError(f"--step={shown(asked)}: {shown(source.path)} has no value of it where the metric has one")
    for column in dict.fromkeys(_candidates(source, "step")):
        if sum(number(row.get(column)) is not None for row, _ in filled) * 2 >= len(filled):
            return column
    return None


def _in_order(steps: NDArray[np.int64]) -> tuple[NDArray[np.intp], str | None]:
    """Positions of the values to keep, by increasing step; and what was wrong with their order.

    A step that falls back a few times is a run that was resumed from a checkpoint: what it had logged from that
    step on is not part of the run. Where it falls back often the rows are just in no order.
    """
    back = np.flatnonzero(np.diff(steps) <= 0)
    if not back.size:
        return np.arange(steps.size), None
    if back.size > max(1, steps.size // 10):
        # In the reversed array the first of equal steps is the one that was logged last.
        _, last = np.unique(steps[::-1], return_index=True)
        kept = steps.size - 1 - last
        repeated = steps.size - kept.size
        why = f"; {repeated:,} values had a step that a later one has too" if repeated else ""
        return kept, f"the rows are not in order of steps and were sorted{why}"
    # A value survives if no later one has its step or a lower one.
    lowest_after = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.flatnonzero(np.append(steps[:-1] < lowest_after[1:], True))
    times = "once" if back.size == 1 else f"{back.size} times"
    return kept, (
        f"the step falls back {times}, first to {steps[back[0] + 1]:,}, as in a resumed run: later values win, "
        f"and {steps.size - kept.size:,} earlier ones are left out"
    )


def _warn_of_end(rows: Sequence[Row], column: str, notes: list[str]) -> None:
    """Some writers make an empty cell of NaN, and then the end of a diverged run just looks empty."""
    filled = np.flatnonzero([number(row.get(column)) is not None for row in rows])
    tail = len(rows) - 1 - int(filled[-1])
    usual = int(np.diff(filled).max()) - 1 if filled.size > 1 else 0
    if tail > max(usual, 1):
        notes.append(f"The last {tail:,} rows have no {shown(column)}: if it was NaN there, the file does not show it.")


def stride_of(step: NDArray[np.int64]) -> int:
    """Steps from one value to the next: the most frequent difference, 1 for a single value."""
    if step.size < 2:
        return 1
    distance, counts = np.unique(np.diff(step), return_counts=True)
    return int(distance[counts.argmax()])


def _extra(source: Source, columns: dict[str, str], series: Series, step: str | None) -> dict[str, Any]:
    """Learning rate and the like at the steps of `series`; only what is there."""
    found: dict[str, Any] = {}
    for role in ("lr", "tokens", "skipped", "max_attn_logit"):
        column = next(_candidates(source, role), None)
        if column is None:
            continue
        other = _series(source, column, step if step is not None else series.step_column, [])
        if series.step_column is None and other.step.size != series.step.size:
            continue  # rows that are counted agree only where both columns are filled everywhere
        values = np.full(series.step.size, np.nan)
        place = np.searchsorted(series.step, other.step).clip(max=series.step.size - 1)
        same = series.step[place] == other.step
        values[place[same]] = other.value[same]
        if same.any():
            columns[role] = column
            found[role] = values > 0 if role == "skipped" else values
    return found


def _value(series: dict[str, Series], role: str) -> NDArray[np.float64] | None:
    return series[role].value if role in series else None
