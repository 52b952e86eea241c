"""The steps of a log: which column holds them, and what a resumed, restarted or unordered log makes of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.judge.log import stride_of
from stability_lab.logs.columns import asked_for, candidates
from stability_lab.logs.sources import Numbers, Source
from stability_lab.logs.splits import begins_anew, begins_in_no_order, epoch_column, epochs, first_level, rows_with
from stability_lab.text import shown

Steps = NDArray[np.int64]

# Values at the same step of a run and of its resumed part are not further apart, whatever their noise.
ALIKE_NATS = 0.5


@dataclass(frozen=True, eq=False)
class Timeline:
    """Rows of a source by their steps, which never fall; rows of one step stand in the order of the log.

    `raw` is the step of every row of the source, NaN where it has none; None where rows were counted or numbered anew.
    """

    column: str | None  # None: the rows are counted
    rows: NDArray[np.intp]
    steps: Steps
    notes: list[str]
    raw: NDArray[np.float64] | None = None
    all_rows: int = 0  # before rows of one step and of earlier attempts are left out

    def steps_with(self, signals: Sequence[Numbers]) -> Steps:
        """Each step at which one of `signals` has a value, once."""
        steps = self.steps[np.any([signal.known[self.rows] for signal in signals], axis=0)]
        return steps[np.append(steps[1:] != steps[:-1], np.ones(steps[:1].size, dtype=np.bool_))]

    def at(self, steps: Steps, numbers: Numbers, everywhere: bool = False) -> Numbers:
        """The values of a column at `steps`; of several values at one step the last.

        `everywhere`: also those of rows that are not of the log, where its own have none.
        """
        known = numbers.known[self.rows]
        if known.all() and np.array_equal(steps, self.steps):
            return Numbers(numbers.value[self.rows], known)
        found = Numbers(np.full(steps.size, np.nan), np.zeros(steps.size, dtype=np.bool_))
        if everywhere and self.raw is not None:
            others = np.flatnonzero(numbers.known & ~np.isnan(self.raw))
            _place(found, steps, self.raw[others], numbers.value[others])
        _place(found, steps, self.steps[known], numbers.value[self.rows[known]])
        return found


def _place(found: Numbers, steps: Steps, at: NDArray[Any], values: NDArray[np.float64]) -> None:
    place = np.searchsorted(steps, at).clip(max=steps.size - 1)
    same = steps[place] == at
    found.value[place[same]] = values[same]
    found.known[place[same]] = True


def timeline(source: Source, signals: Sequence[str], asked: str | None = None) -> Timeline:
    """Steps of the rows that have a value of one of the columns `signals`: no other row has a say in them."""
    rows = np.flatnonzero(rows_with(source, signals))
    notes: list[str] = []
    column = step_column(source, rows, asked, notes)
    if column is None:
        notes.append("No step column was found: rows are counted as steps (--step COLUMN names one).")
        return Timeline(None, rows, np.arange(1, rows.size + 1), notes, all_rows=rows.size)
    values, known = source.numbers(column, "step")
    if missing := np.count_nonzero(~known[rows]):
        some = "row with a value has" if missing == 1 else "rows with a value have"
        notes.append(f"{missing:,} {some} no {shown(column)} and {'is' if missing == 1 else 'are'} left out.")
    rows = rows[known[rows]]
    steps = values[rows]
    for wrong, what in (
        (steps != np.floor(steps), "no whole number"),
        (np.abs(steps) >= 2**53, "too large for a step"),
    ):
        if wrong.any():
            raise ConfigError(
                f"{source.name}: the step column {shown(column)} holds {steps[wrong][0]:g}, which is {what}; "
                "--step COLUMN names another"
            )
    within = through_epochs(steps.astype(np.int64), epochs(source, rows))
    kept, numbered, note = in_order(within, source.numbers(signals[0]).value[rows], source)
    if not np.array_equal(within, steps):
        notes.append(f"{shown(column)} counts within an epoch: the steps were numbered through.")
    raw = np.where(known, values, np.nan) if np.array_equal(numbered, steps[kept]) else None
    return Timeline(column, rows[kept], numbered, [*notes, *([note] if note else [])], raw, rows.size)


def step_column(source: Source, rows: NDArray[np.intp], asked: str | None, notes: list[str]) -> str | None:
    """The named column, or the first known one that has a value in half of the rows and does not stand still.

    One that goes through is better than one that begins anew each epoch; the epoch itself is the last resort.
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
    epoch = epoch_column(source, rows)
    if not usable and epoch is not None and np.diff(source.numbers(epoch).value[rows]).all():
        notes.append(f"There is no step column but one row an {shown(epoch)}: a step is an epoch here.")
        return epoch
    through = (column for column, steps in usable.items() if not (np.diff(steps) < 0).any())
    return next(through, next(iter(usable), None))


def through_epochs(steps: Steps, epoch: NDArray[np.float64] | None) -> Steps:
    """Steps that count within each epoch, numbered through by the epoch; others as they are."""
    if epoch is None or not (np.diff(steps) < 0).any():
        return steps
    found, place = np.unique(epoch, return_inverse=True)
    first = np.array([steps[place == i].min() for i in range(found.size)])
    last = np.array([steps[place == i].max() for i in range(found.size)])
    if found.size < 2 or (first[1:] > last[:-1]).all():
        return steps
    stride = stride_of(np.unique(steps[place == 0]))
    before = np.r_[0, np.cumsum(last - first + stride)[:-1]]
    return steps - first[place] + before[place] + first[0]


def in_order(steps: Steps, values: NDArray[np.float64], source: Source) -> tuple[NDArray[np.intp], Steps, str | None]:
    """Positions of the rows to keep, their steps, which never fall, and what was wrong with their order.

    Steps that begin anew are numbered through: `splits.by_restarts` has told other runs apart. Steps that fall back to
    a later one are those of a run that was resumed from a checkpoint, if the values go on there; what it had logged
    from that step on is no part of the run. ConfigError where they do not, or where the rows are in no order and have
    several values for a step.
    """
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if not back.size:
        return np.arange(steps.size), steps, None
    if begins_in_no_order(steps):
        if np.unique(steps).size < steps.size:
            raise ConfigError(
                f"{source.name}: the rows are in no order of steps, and some steps have several values: {source.apart}"
            )
        kept = np.argsort(steps, kind="stable")
        return kept, steps[kept], "The rows are not in order of steps and were sorted."
    anew, resumed = back[begins_anew(steps, back)], back[~begins_anew(steps, back)]
    stride = stride_of(np.unique(steps[: back[0]]))
    numbered = steps.copy()
    for at in anew.tolist():
        numbered[at:] = steps[at:] + numbered[at - 1] + stride - steps[at]
    for at in resumed.tolist():
        _check_resume(numbered, values, at, source)
    # A row survives if no later part begins at its step or at a lower one.
    begins = numbered[np.r_[0, back]]
    lowest_later = np.r_[np.minimum.accumulate(begins[:0:-1])[::-1], np.iinfo(np.int64).max]
    kept = np.flatnonzero(numbered < lowest_later[np.searchsorted(back, np.arange(steps.size), side="right")])
    notes = []
    if anew.size:
        notes.append(
            f"The steps begin anew {_times(anew.size)}, first at {steps[anew[0]]:,} after {steps[anew[0] - 1]:,}, and "
            "the values go on: they were numbered through."
        )
    if resumed.size:
        notes.append(
            f"The step falls back {_times(resumed.size)}, first to {steps[resumed[0]]:,}, as in a resumed run: later "
            f"values win, and {steps.size - kept.size:,} earlier rows are left out."
        )
    return kept, numbered[kept], " ".join(notes)


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def noise_of(values: NDArray[np.float64]) -> float:
    """The robust deviation of the changes from one finite value to the next; 0 for fewer than two."""
    changes = np.abs(np.diff(values[np.isfinite(values)]))
    return 1.4826 * float(np.median(changes)) if changes.size else 0.0


def _check_resume(steps: Steps, values: NDArray[np.float64], at: int, source: Source) -> None:
    """Refuse rows that begin again at an earlier step with values of another run."""
    before, after = values[:at], values[at:]
    known = before[np.isfinite(before)]
    shared = before[np.abs(steps[:at] - steps[at]) <= 5 * stride_of(np.unique(steps[:at]))]
    shared = shared[np.isfinite(shared)]
    if known.size < 2 or not shared.size or not np.isfinite(first_level(after)):
        return
    noise = noise_of(known)
    spread = float(np.percentile(known, 95) - np.percentile(known, 5))
    new, old = first_level(after), float(np.median(shared))
    if abs(new - old) > max(ALIKE_NATS, 6 * noise, 0.25 * spread):
        raise ConfigError(
            f"{source.name}: the step falls back to {steps[at]:,}, and the values from there on ({new:.3g}) are not "
            f"those of a run that was resumed ({old:.3g}): {source.apart}"
        )
