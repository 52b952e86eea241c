"""How often a run spikes, with an interval, and when that is more than in healthy runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.divergence import RISING_NATS
from stability_lab.judge.events import SPIKES, Event
from stability_lab.judge.log import Log
from stability_lab.judge.spikes import MERGE

# Values until the signal is back: a spike of one or two odd batches, and one from which the run had to recover.
BRIEF, SLOW = 3, 20
# Spikes per 1,000 values above which a run is spiky, all of them and those that last longer than `BRIEF`. In 32 public
# logs of healthy pre-training (docs/judge.md) the highest rates are 4.9 and 0.1.
ALL_LIMIT, LASTING_LIMIT = 5.0, 0.1
# A run that begins to spike late is not saved by its length: the rates of its parts of so many values count, too.
PART = 1000
# A rise of the gradient norm, as a factor, that makes a run undecided if it is not over; of the loss, RISING_NATS.
TALL_TIMES = 10.0


@dataclass(frozen=True)
class Rate:
    """`count` spikes in `values`, per 1,000 of them with the exact Poisson interval (Garwood, 1936).

    The interval holds 95%, or so much more that the one of the most spiky of `parts` holds it.
    """

    count: int
    values: int
    parts: int = 1

    @property
    def per_1000(self) -> float:
        return 1000 * self.count / self.values

    @property
    def interval(self) -> tuple[float, float]:
        from scipy.special import gammaincinv  # a fifth of a second, which most runs of `train` can do without

        tail = 0.025 / self.parts
        low = gammaincinv(self.count, tail) if self.count else 0.0
        high = gammaincinv(self.count + 1, 1 - tail)
        return float(1000 * low / self.values), float(1000 * high / self.values)

    def exceeds(self, limit: float) -> bool:
        """Whether chance alone does not explain a rate above `limit` per 1,000."""
        return self.per_1000 > limit and self.interval[0] > limit

    def __str__(self) -> str:
        low, high = map(_short, self.interval)
        return f"{_short(self.per_1000)} per 1,000 values (95%: {low} to {high})"


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.1g}"


@dataclass(frozen=True)
class Spikes:
    """The spikes of a run that are its own: those of loss and gradient norm at the same place are one.

    `all` and `lasting`, those that took over 3 values to recover, are the rates of the whole log, or of its most spiky
    part where that alone exceeds a limit. `slow` are events that took more than 20 values, `lost` those of a loss that
    was not finite. `open` is the first tall one that is not back at the end; `back`: every one is. `batches` counts
    those that other runs have too.
    """

    first: Event | None
    count: int
    all: Rate
    lasting: Rate
    slow: list[Event]
    lost: list[Event]
    open: Event | None
    back: bool
    batches: int

    @property
    def sick(self) -> bool:
        rates = self.lasting.exceeds(LASTING_LIMIT) or self.all.exceeds(ALL_LIMIT)
        return bool(self.slow or self.lost) or rates


def spikes_of(log: Log, events: Sequence[Event]) -> Spikes:
    """Count the spikes of `events`, without those that are batches."""
    stride = log.stride
    own = [event for event in events if event.kind in SPIKES and event.cause is None]
    clusters = _clusters(own, MERGE * stride)
    rows = np.searchsorted(log.step, [cluster[0].step for cluster in clusters])
    counts = np.array([max(event.count for event in cluster) for cluster in clusters], dtype=np.intp)
    # A new level is no spike that lasts.
    away = [max((event.recovery or 0) / stride for event in cluster) for cluster in clusters]
    lasts = np.array([rows > BRIEF for rows in away], dtype=np.bool_)
    firsts = sorted(clusters[0], key=lambda event: event.signal != "loss") if clusters else [None]
    return Spikes(
        first=firsts[0],
        count=int(counts.sum()),
        all=_rate(rows, counts, len(log), ALL_LIMIT),
        lasting=_rate(rows[lasts], counts[lasts], len(log), LASTING_LIMIT),
        slow=[event for event in own if event.recovery is not None and event.recovery > SLOW * stride],
        lost=[event for event in events if event.kind == "nonfinite_step" and event.signal == "loss"],
        open=next((event for event in own if event.recovery is None and is_tall(event)), None),
        back=all(event.recovery is not None for event in own),
        batches=sum(event.cause == "batch" for event in events),
    )


def _rate(rows: NDArray[np.intp], counts: NDArray[np.intp], values: int, limit: float) -> Rate:
    """The rate of the whole, or of its most spiky part of `PART` values, counted from the end."""
    whole = Rate(int(counts.sum()), values)
    parts = values // PART
    if parts < 2 or whole.exceeds(limit):
        return whole
    part = (values - 1 - rows) // PART
    inside = part < parts
    most = int(np.bincount(part[inside], counts[inside], minlength=1).max())
    worst = Rate(most, PART, parts)
    return worst if worst.exceeds(limit) else whole


def _clusters(events: Sequence[Event], reach: int) -> list[list[Event]]:
    clusters: list[list[Event]] = []
    for event in events:
        if clusters and event.step - clusters[-1][-1].step <= reach:
            clusters[-1].append(event)
        else:
            clusters.append([event])
    return clusters


def is_tall(event: Event) -> bool:
    """Whether a jump from which the signal did not come back is more than a small change of its level."""
    assert event.height is not None
    assert event.value is not None
    if event.signal == "loss":
        return event.height >= RISING_NATS
    return event.value >= TALL_TIMES * (event.value - event.height)
