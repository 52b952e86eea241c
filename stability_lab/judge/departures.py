"""Where a series leaves its level upwards: jumps, level shifts and slow rises, in units of the series' own noise.

Every rule looks backwards from the row at which it fires. The series is a loss in nats or the logarithm of a gradient
norm, whose noise is in proportion to its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.spikes import (
    DEFINITIONS,
    MERGE,
    ROBUST_THRESHOLD,
    ROBUST_WINDOW,
    Definition,
    flag_spikes,
    rolling_median,
    trailing_level,
)

Array = NDArray[np.float64]

# A jump is measured from the median of the values just before it, so that the trend of a falling loss is the same in
# all of them, and compared with the jumps of the window before it.
CENTRE_ROWS = 8
JUMP = Definition("jump", ROBUST_WINDOW, ROBUST_THRESHOLD, False, "median", False, 8, flat_jumps=True)
# Few values know little of their noise: with so many or fewer before it, a jump counts from twice the threshold on.
FEW_ROWS = 24
# Jumps up to so many rows apart, between which the signal was not back, belong to one spike.
SPIKE_ROWS = 50
# A level shift: medians of EDGE_ROWS before and after a row differ, by SHIFT_DEVIATIONS of such differences in the
# SHIFT_HISTORY rows before, and LEFT_PART of it is left for SHIFT_ROWS.
SHIFT_ROWS, EDGE_ROWS, SHIFT_HISTORY, SHIFT_DEVIATIONS, LEFT_PART = 50, 10, 100, 6.0, 0.7
# A slow rise: three medians of RISE_ROWS in a row, RISE_ROWS / 2 apart, are above the lowest one.
RISE_ROWS, RISE_DEVIATIONS = 50, 6.0
# Slopes before and after a level shift are compared over up to so many rows.
SLOPE_ROWS = 500


@dataclass(frozen=True)
class Floors:
    """What is too small to count, however little noise there is: nats, or parts of ln of a gradient norm."""

    spike: float
    shift: float
    rise: float


FLOORS = {
    "loss": Floors(spike=0.02, shift=0.2, rise=0.25),
    "grad_norm": Floors(spike=float(np.log(1.5)), shift=float(np.log(2)), rise=float(np.log(3))),
}


@dataclass(frozen=True)
class Spike:
    """Rows of a spike: `flagged` are those that jump from `level`, `away` the longest way from one of them to where the
    signal was back, None if it is not back after the last one. `count` is how often it left its level."""

    flagged: NDArray[np.intp]
    level: float
    away: tuple[int, int] | None
    count: int

    @property
    def begin(self) -> int:
        return int(self.flagged[0])


@dataclass(frozen=True)
class Drift:
    """A level shift or slow rise from `low` to `top`, first seen at row `seen`; `back` is None if it never was back.

    `falls_on`: the series fell before a shift and falls after it, as when the data change.
    """

    begin: int
    seen: int
    back: int | None
    low: float
    top: float
    falls_on: bool = False


def spikes(y: Array, floors: Floors, start: int = 0) -> list[Spike]:
    """Spikes with a flagged row at or after `start`; `y` of shape (n,) may hold non-finite values, which are none."""
    first = max(0, start - SPIKE_ROWS - MERGE)
    at, level, limit = _jumps(y, floors, first)
    fall, found = Falls(y), []
    for group in _excursions(at, level, limit, fall):
        low, half, rows = float(level[group[0]]), limit[group[0]] / 2, at[group]
        ways = [(int(row), fall.first(int(row) + 1, low + half)) for row in rows]
        known = [(row, back) for row, back in ways if back is not None]
        away = max(known, key=lambda way: way[1] - way[0]) if len(known) == len(ways) else None
        again = sum(back is not None and back <= later for (_, back), later in zip(ways, rows[1:], strict=False))
        found.append(Spike(rows, low, away, 1 + int(again)))
    return found


def _jumps(y: Array, floors: Floors, first: int) -> tuple[NDArray[np.intp], Array, Array]:
    """Rows from `first` on that jump, the level before each, and the height above it that counts."""
    every = np.arange(y.size)
    centre, _ = trailing_level(y, every, CENTRE_ROWS)
    jump = y - centre
    jump[:3] = np.nan  # the first ones have no level to be measured from
    sudden = first + np.flatnonzero(flag_spikes(jump, JUMP, start=first))
    sudden = sudden[np.isfinite(jump[sudden])]
    usual, scale = trailing_level(jump, sudden, ROBUST_WINDOW)
    limit = ROBUST_THRESHOLD * scale * np.where(sudden < FEW_ROWS, 2, 1)
    keep = jump[sudden] - usual > np.maximum(limit, floors.spike)
    # What climbs too slowly to jump still stands out of a longer window.
    slow = first + np.flatnonzero(flag_spikes(y, DEFINITIONS["robust"], start=first))
    slow = np.setdiff1d(slow[np.isfinite(y[slow])], sudden[keep])
    wide, spread = trailing_level(y, slow, ROBUST_WINDOW)
    tall = y[slow] - wide > np.maximum(ROBUST_THRESHOLD * spread, floors.spike)
    at = np.r_[sudden[keep], slow[tall]]
    order = np.argsort(at, kind="stable")
    level = np.r_[(centre[sudden] + usual)[keep], wide[tall]]
    height = np.maximum(np.r_[limit[keep], ROBUST_THRESHOLD * spread[tall]], floors.spike)
    return at[order], level[order], height[order]


def _excursions(at: NDArray[np.intp], level: Array, limit: Array, fall: Falls) -> Iterator[list[int]]:
    """Indices into `at`, those of one spike together. A row belongs to the spike of the one before if it is close to
    it, or if the signal was not back between them; so that the rows of a long log that are looked at decide nothing."""
    group: list[int] = []
    for i, row in enumerate(at.tolist()):
        if group and row - at[i - 1] > MERGE:
            back = fall.first(int(at[i - 1]) + 1, float(level[i - 1] + limit[i - 1] / 2))
            if row - at[i - 1] > SPIKE_ROWS or (back is not None and back < row):
                yield group
                group = []
        group.append(i)
    if group:
        yield group


def shifts(y: Array, floors: Floors, start: int = 0) -> list[Drift]:
    """Level shifts upwards that are seen at or after row `start`; `y` is finite."""
    first = max(0, start - SHIFT_HISTORY - 3 * SHIFT_ROWS)
    part = y[first:]
    if part.size < 2 * SHIFT_ROWS:
        return []
    edge = rolling_median(part, EDGE_ROWS)
    step = np.full(part.size, np.nan)  # the median of the ten values from a row on, less that of the ten before it
    step[EDGE_ROWS : edge.size] = edge[EDGE_ROWS:] - edge[:-EDGE_ROWS]
    at = np.arange(SHIFT_ROWS, part.size - SHIFT_ROWS + 1)
    at = at[step[at] > floors.shift]
    # The largest of its neighbours, the first one of equals.
    at = at[np.argmax(step[at[:, None] + np.arange(-EDGE_ROWS, EDGE_ROWS + 1)], axis=1) == EDGE_ROWS] if at.size else at
    if not at.size:
        return []
    padded = np.r_[np.full(SHIFT_HISTORY, np.nan), step]
    history = padded[at[:, None] + np.arange(SHIFT_HISTORY) - EDGE_ROWS]
    usual = np.nanmedian(history, axis=1)
    noise = 1.4826 * np.nanmedian(np.abs(history - usual[:, None]), axis=1)
    size = step[at] - usual
    half = SHIFT_ROWS // 2
    before = part[at[:, None] - np.arange(SHIFT_ROWS, 0, -1)]
    slope = np.minimum(0.0, np.median(before[:, half:], axis=1) - np.median(before[:, :half], axis=1)) / half
    ahead = np.array([15, 25, 35, 45])
    left = edge[at[:, None] + ahead - EDGE_ROWS // 2] - edge[at - EDGE_ROWS][:, None] - 0.5 * slope[:, None] * ahead
    stays = left.min(axis=1) >= LEFT_PART * size
    found = at[stays & (size > np.maximum(floors.shift, SHIFT_DEVIATIONS * noise))]
    return [_shift(y, part, edge, int(row), first) for row in found]


def _shift(y: Array, part: Array, edge: Array, row: int, first: int) -> Drift:
    """The level shift at `row` of `part`, which is `y` from row `first` on with its medians of ten, `edge`."""
    low, top = float(edge[row - EDGE_ROWS]), float(edge[row])
    # Medians of ten stay the same over a few rows: the shift is at the first row of which this and most of the next two
    # are beyond the middle.
    close = part[row - EDGE_ROWS // 2 + np.arange(EDGE_ROWS)[:, None] + np.arange(3)] > (low + top) / 2
    begin = first + row - EDGE_ROWS // 2 + int(np.argmax(close[:, 0] & (close.sum(axis=1) > 1)))
    back = Falls(edge).first(row + 1, (low + top) / 2)
    return Drift(
        begin=begin,
        seen=first + row + SHIFT_ROWS - 1,
        back=None if back is None else first + back + EDGE_ROWS - 1,
        low=low,
        top=top,
        falls_on=_falls_on(y, begin, low, top),
    )


def _falls_on(y: Array, begin: int, low: float, top: float) -> bool:
    """Whether the level alone changed at row `begin`, as when the data do: within a row, in a series that fell before
    and falls after it, neither much slower nor much faster than before."""
    before, after = y[max(0, begin - SLOPE_ROWS) : begin], y[begin + EDGE_ROWS // 2 : begin + SLOPE_ROWS]
    if after.size < SHIFT_ROWS or np.median(y[begin : begin + 3]) - low < 0.8 * (top - low):
        return False
    (fell, unsure), (falls, no_less_than) = _fall(before), _fall(after)
    per_row = falls / after.size * before.size
    return fell > unsure and falls > no_less_than and 0.03 * fell < per_row < 3 * fell


def _fall(y: Array) -> tuple[float, float]:
    """How far the median falls from the first to the last third, and what is within its noise (3 deviations)."""
    third = y.size // 3
    noise = 1.4826 * float(np.median(np.abs(np.diff(y)))) / np.sqrt(2)
    return float(np.median(y[:third]) - np.median(y[-third:])), 3 * 1.2533 * noise * np.sqrt(2 / third)


def rises(y: Array, floors: Floors) -> list[Drift]:
    """Slow rises of all of `y`, which is finite; one that a level shift explains is none."""
    half = RISE_ROWS // 2
    levels = rolling_median(y, RISE_ROWS, half)
    if not levels.size:
        return []
    ends = half * np.arange(levels.size) + RISE_ROWS
    spread = trailing_level(y, np.minimum(ends, y.size - 1), RISE_ROWS)[1]
    margins = np.maximum(floors.rise, RISE_DEVIATIONS * 1.2533 * spread / np.sqrt(RISE_ROWS))
    fall = Falls(levels)
    found: list[Drift] = []
    earlier: list[Drift] = []
    low, margin, near, above = np.inf, 0.0, 0, 0  # lowest level and its margin, the last sample near it, samples above
    j = 0
    while j < levels.size:
        level = float(levels[j])
        if level < low:
            low, margin = level, float(margins[j])
        near = j if level <= low + margin / 4 else near
        above = above + 1 if level > low + margin else 0
        if above < 3:
            j += 1
            continue
        end = half * j + RISE_ROWS - 1
        since = max(0, half * near - SHIFT_ROWS)
        if any(jump.begin >= since for jump in shifts(y[: end + 1], floors, since)):
            low, margin, near, above = level, float(margins[j]), j, 0  # the new level is the one to rise from
            continue
        back = fall.first(j + 1, low + margin / 2)
        last = levels.size - 1 if back is None else back
        rise = Drift(
            begin=end - 2 * half,
            seen=end,
            back=None if back is None else half * last + RISE_ROWS - 1,
            low=low,
            top=float(levels[j - 2 : last + 1].max()),
        )
        # The second of two like it is a wave.
        wave = any(abs(past.low - low) <= margin and past.top >= level - margin for past in earlier)
        found += [] if wave else [rise]
        earlier.append(rise)
        low, near, above, j = np.inf, last, 0, last + (1 if back is None else 0)
    return found


class Falls:
    """Finds where a series falls to a level.

    A search costs as much as the way there, and nothing where the series never falls so far.
    """

    def __init__(self, x: Array):
        self.x = x
        self.lowest_after = np.fmin.accumulate(x[::-1])[::-1]

    def first(self, begin: int, level: float) -> int | None:
        """First position from `begin` on at which the series is at or below `level`."""
        if begin >= self.x.size or not self.lowest_after[begin] <= level:
            return None
        width = 64
        while True:
            where = np.flatnonzero(self.x[begin : begin + width] <= level)
            if where.size:
                return begin + int(where[0])
            begin, width = begin + width, 2 * width
