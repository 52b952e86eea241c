"""The steps of a log: which column holds them, and what a resumed, restarted or unordered log makes of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.judge.log import stride_of
from stability_lab.logs.columns import asked_for, candidates
from stability_lab.logs.sources import Numbers, Source
from stability_lab.text import shown

Steps = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Rows of a source by their steps, which never fall; rows of one step stand in the order of the log."""

    column: str | None  # None: the rows are counted
    rows: NDArray[np.intp]
    steps: Steps
    notes: list[str]

    def steps_with(self, signals: Sequence[Numbers]) -> Steps:
        """Each step at which one of `signals` has a value, once."""
        steps = self.steps[np.any([signal.known[self.rows] for signal in signals], axis=0)]
        return steps[np.append(steps[1:] != steps[:-1], np.ones(steps[:1].size, dtype=np.bool_))]

    def at(self, steps: Steps, numbers: Numbers) -> Numbers:
        """The values of a column at `steps`; of several values at one step the last."""
        known = numbers.known[self.rows]
        place = np.searchsorted(steps, self.steps[known]).clip(max=steps.size - 1)
        same = steps[place] == self.steps[known]
        found = Numbers(np.full(steps.size, np.nan), np.zeros(steps.size, dtype=np.bool_))
        found.value[place[same]] = numbers.value[self.rows[known][same]]
        found.known[place[same]] = True
        return found


def timeline(source: Source, signals: Sequence[str], others: Sequence[str] = (), asked: str | None = None) -> Timeline:
    """Steps of the rows that have a value of one of the columns `signals`, and of `others` if rows are not counted."""
    rows = _rows_with(source, signals)
    notes: list[str] = []
    column = _step_column(source, rows, asked, notes)
    if column is None:
        notes.append("No step column was found: rows are counted as steps (--step COLUMN names one).")
        return Timeline(None, rows, np.arange(1, rows.size + 1), notes)
    values, known = source.numbers(column, "step")
    if missing := np.count_nonzero(~known[rows]):
        notes.append(f"{missing:,} rows with a value have no {shown(column)} and are left out.")
    rows = _rows_with(source, (*signals, *others))
    rows = rows[known[rows]]
    steps = values[rows]
    wrong = steps[~(np.isfinite(steps) & (np.abs(steps) < 2**53) & (steps == np.floor(steps)))]
    if wrong.size:
        raise ConfigError(
            f"{source.name}: the step column {shown(column)} holds {wrong[0]:g}, which is no whole number; "
            "--step COLUMN names another"
        )
    kept, numbered, note = in_order(steps.astype(np.int64))
    return Timeline(column, rows[kept], numbered, [*notes, *([note] if note else [])])


def _rows_with(source: Source, columns: Sequence[str]) -> NDArray[np.intp]:
    return np.flatnonzero(np.any([source.numbers(column).known for column in columns], axis=0))


def _step_column(source: Source, rows: NDArray[np.intp], asked: str | None, notes: list[str]) -> str | None:
    """The named column, or the first known one that has a value in half of the rows and does not stand still.

    One that goes through is better than one that begins anew each epoch.
    """
    columns = candidates(source, "step") if asked is None else [asked_for(source, "step", asked)]
    usable: dict[str, NDArray[np.float64]] = {}
    for column in columns:
        values, known = source.numbers(column, "step")
        steps = values[rows[known[rows]]]
        still = steps.size > 2 and steps.min() == steps.max()
        if asked is not None and (not steps.size or still):
            what = f"is {steps[0]:g} throughout" if still else "has no value where the log has one"
            raise ConfigError(f"--step={shown(asked)}: in {source.name} it {what}")
        if still:
            notes.append(f"The column {shown(column)} is {steps[0]:g} throughout and no step.")
        elif steps.size and 2 * steps.size >= rows.size:
            usable[column] = steps
    return next((column for column, steps in usable.items() if _epoch(steps) is None), next(iter(usable), None))


def in_order(steps: Steps) -> tuple[NDArray[np.intp], Steps, str | None]:
    """Positions of the rows to keep, their steps, which never fall, and what was wrong with their order.

    A step that falls back to the first one each time the same last one was reached begins anew each epoch, and is
    numbered through. One that falls back a few times is that of a run that was resumed from a checkpoint: what it had
    logged from that step on is not part of the run. Where it falls back often the rows are just in no order.
    """
    back = np.flatnonzero(np.diff(steps) < 0)
    if not back.size:
        return np.arange(steps.size), steps, None
    segment = np.r_[0, np.cumsum(np.diff(steps) < 0)]
    if (epoch := _epoch(steps)) is not None:
        note = (
            f"The steps begin anew {back.size} times, each time at {steps[0]:,} after {steps[back[0]]:,}, as in a log "
            "that counts within an epoch: they were numbered through."
        )
        return np.arange(steps.size), steps + segment * epoch, note
    if back.size > max(1, steps.size // 10):
        kept = np.argsort(steps, kind="stable")
        return kept, steps[kept], "The rows are not in order of steps and were sorted."
    # A row survives if no later part begins at its step or at a lower one.
    begins = steps[np.r_[0, back + 1]]
    lowest_later = np.r_[np.minimum.accumulate(begins[:0:-1])[::-1], np.iinfo(np.int64).max]
    kept = np.flatnonzero(steps < lowest_later[segment])
    times = "once" if back.size == 1 else f"{back.size} times"
    return (
        kept,
        steps[kept],
        f"The step falls back {times}, first to {steps[back[0] + 1]:,}, as in a resumed run: later values win, "
        f"and {steps.size - kept.size:,} earlier rows are left out.",
    )


def _epoch(steps: NDArray[np.float64] | Steps) -> int | None:
    """Steps in an epoch, where the steps begin anew at least twice, always alike; else None."""
    back = np.flatnonzero(np.diff(steps) < 0)
    begins, ends = steps[np.r_[0, back + 1]], steps[np.r_[back, steps.size - 1]]
    if back.size < 2 or np.any(begins != begins[0]) or np.any(ends[:-1] != ends[0]) or ends[-1] > ends[0]:
        return None
    return int(ends[0] - begins[0]) + stride_of(np.unique(steps[: back[0] + 1]).astype(np.int64))
