"""Whether and where a finite loss left its level for good: where to go back to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.events import Event
from stability_lab.judge.log import Log
from stability_lab.judge.spikes import rolling_median

Array = NDArray[np.float64]

# How far, in nats, the loss must end above its lowest level for a finite run to count as diverged, and the other
# distances for which the verdict is given too.
RISE_NATS = 1.0
RISES = (0.5, 1.0, 2.0)
# How far above its begin a run that diverged ends, in nats, and which part of a fall it has lost that is back there.
ABOVE_NATS, LOST_PART, LOST_NATS = 0.5, 0.9, 0.5
# Another mixture of data adds up to so much to a loss; what adds more is none.
DATA_NATS = 2.75
# A loss less than this below its reference has not left it.
MARGIN_NATS = 0.05
# The end of the loss is a median of so many values, whatever the length of the log; its begin of so many.
END_ROWS, BEGIN_ROWS = 20, 5
# The lowest level is a mean over END_ROWS values, or over this part of them where that is more.
LEVEL_PART = 0.02
# A rise of so many nats that is not over leaves a run undecided, and is said. One too new to be an event is looked for
# in so many last values, against so many before them.
RISING_NATS, LATE_ROWS, BEFORE_ROWS = 0.25, 100, 400
# Standard errors that an end must be off in noisy logs.
SURE = 6.0

# Sums of up to 1e5 losses are exact to about this, and a larger loss than the cap means the same as the cap.
_ROUNDING, _CAP = 1e-6, 1e4


@dataclass(frozen=True, eq=False)
class Losses:
    """The finite losses of a log without skipped steps, with their levels; changes of the data are taken out."""

    step: NDArray[np.int64]
    value: Array
    begins: bool  # whether the first of them are the first of the run

    @property
    def n(self) -> int:
        return self.value.size

    @property
    def begin(self) -> float:
        """The median of the first five."""
        return float(np.median(self.value[:BEGIN_ROWS]))

    @property
    def end(self) -> float:
        """The median of the last twenty."""
        return float(np.median(self.value[-END_ROWS:]))

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of one loss, from the differences of neighbours, without their trend."""
        if self.n < 3:
            return 0.0
        steps = np.diff(self.value)
        return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)

    @property
    def noise(self) -> float:
        """The standard error of the end, a median."""
        return 1.2533 * self.deviation / math.sqrt(max(1, min(self.n, END_ROWS)))

    @property
    def peak(self) -> int:
        """The row of the highest loss after the lowest level."""
        lowest = int(self.level().argmin()) + self.width - 1
        return lowest + int(self.value[lowest:].argmax())

    @property
    def frozen(self) -> int:
        """How many losses at the end are exactly the same."""
        other = np.flatnonzero(self.value != self.value[-1])
        return self.n - 1 - int(other[-1]) if other.size else self.n

    @property
    def width(self) -> int:
        return min(self.n, max(END_ROWS, math.ceil(LEVEL_PART * self.n)))

    def level(self) -> Array:
        """Rolling means; the first one ends at the row that is the last of its window."""
        return _means(self.value, self.width)

    def tenths(self) -> tuple[Array, float]:
        """Rolling means over a tenth of the log, and what noise alone makes of them (4 standard errors)."""
        width = min(self.n, max(END_ROWS, self.n // 10))
        return _means(self.value, width), 4 * self.noise / 1.2533 * math.sqrt(min(self.n, END_ROWS) / width)


def _means(x: Array, width: int) -> Array:
    sums = np.r_[0.0, np.cumsum(np.clip(x, -_CAP, _CAP))]
    return (sums[width:] - sums[:-width]) / width


def losses_of(log: Log, events: Sequence[Event] = ()) -> Losses:
    """The losses of a log without skipped steps.

    Level shifts of `events` whose cause may be the data are taken out, unless they are together higher than data make a
    loss, or end near the begin of the run.
    """
    if log.loss is None:
        return Losses(log.step[:0], np.empty(0), False)
    finite = np.isfinite(log.loss)
    raw = Losses(log.step[finite], log.loss[finite], len(log) > 0 and int(log.step[0]) <= max(10, 2 * log.stride))
    shifts = [
        (event.step, event.height)
        for event in events
        if (event.kind, event.signal, event.cause, event.recovery) == ("level_shift", "loss", "data", None)
        and event.height is not None
    ]
    if not shifts or sum(height for _, height in shifts) > DATA_NATS:
        return raw
    if raw.begins and raw.end > raw.begin - MARGIN_NATS:
        return raw
    taken = np.sum([np.where(raw.step >= step, height, 0.0) for step, height in shifts], axis=0)
    return Losses(raw.step, raw.value - taken, raw.begins)


def rose(losses: Losses, delta: float = RISE_NATS) -> int | None:
    """First step of a rise to over `delta` nats above the lowest level that lasts until the end, or None."""
    if losses.n < 2 * END_ROWS:
        return None
    lowest = float(losses.level().min())
    limit = lowest + max(delta, SURE * losses.noise) + _ROUNDING
    return None if losses.end <= limit else left(losses, lowest + delta / 2, lowest + delta)


def ended_above(losses: Losses, begin: float) -> bool:
    """Whether the run ended far above the loss with which it began, be it with its very last value."""
    if losses.n < END_ROWS:
        return False
    last = float(losses.value[-1]) > begin + ABOVE_NATS + SURE * losses.deviation
    return last or losses.end > begin + ABOVE_NATS + SURE * losses.noise


def rises_at_end(losses: Losses) -> bool:
    """Whether the end is above all levels of the `BEFORE_ROWS` values before its last `LATE_ROWS`, or, in a shorter
    log, above the lowest level, by too little for a divergence: a slow rise shows itself later."""
    if losses.n < 2 * END_ROWS:
        return False
    if losses.n < LATE_ROWS + 2 * END_ROWS:
        usual = float(losses.level().min())
    else:
        usual = float(rolling_median(losses.value[-BEFORE_ROWS - LATE_ROWS : -LATE_ROWS], END_ROWS).max())
    return losses.end > usual + RISING_NATS + SURE * losses.noise


def lost_all(losses: Losses, begin: float) -> bool:
    """Whether the loss had fallen and is back where it began."""
    if losses.n < 2 * END_ROWS:
        return False
    fall = begin - float(losses.level().min())
    return fall >= max(LOST_NATS, SURE * losses.noise) and begin - losses.end < (1 - LOST_PART) * fall


def left(losses: Losses, limit: float, high: float) -> int:
    """The step at which the losses left `limit` upwards for good, to end above `high`.

    A median lags behind what it is a median of. So the step is looked for from the window of the last median within the
    limit on: where the summed distances from the limit are smallest (Page, Biometrika 41, 1954), which one outlier, cut
    at what lies below the limit, cannot move far.
    """
    x = losses.value
    level = rolling_median(x, min(END_ROWS, x.size))
    width = x.size - level.size + 1
    fine = np.flatnonzero(level <= high)
    after = int(fine[-1]) + 1 if fine.size else 0
    within = np.flatnonzero(level[:after] <= limit)
    begin = int(within[-1]) if within.size else 0
    reach = max(limit - float(level.min()), MARGIN_NATS)
    # As far again beyond the first median that is too high, which an outlier shortly before the rise may have made so.
    sums = np.cumsum(np.clip(x[begin : after + 2 * width] - limit, -reach, reach))
    lowest = int(sums.argmin())
    return int(losses.step[begin if sums[lowest] > 0 else min(begin + lowest + 1, x.size - 1)])
