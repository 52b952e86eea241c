"""How often a run spikes, with an interval, and when that is more than in healthy runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import gammaincinv

from stability_lab.judge.events import SPIKES, Event
from stability_lab.judge.log import Log
from stability_lab.judge.spikes import MERGE

# Values until the signal is back: a spike of one or two odd batches, and one from which the run had to recover.
BRIEF, SLOW = 3, 20
# Spikes per 1,000 values above which a run is spiky, all of them and those that last longer than `BRIEF`. In 32 public
# logs of healthy pre-training (docs/judge.md) the highest rates are 4.9 and 0.1.
ALL_LIMIT, LASTING_LIMIT = 5.0, 0.1
# A rise of the loss in nats, or of the gradient norm as a factor, that makes a run undecided if it is not over.
TALL_NATS, TALL_TIMES = 0.25, 10.0


@dataclass(frozen=True)
class Rate:
    """`count` spikes in `values`, per 1,000 of them with the exact Poisson interval of 95% (Garwood, 1936)."""

    count: int
    values: int

    @property
    def per_1000(self) -> float:
        return 1000 * self.count / self.values

    @property
    def interval(self) -> tuple[float, float]:
        low = gammaincinv(self.count, 0.025) if self.count else 0.0
        high = gammaincinv(self.count + 1, 0.975)
        return float(1000 * low / self.values), float(1000 * high / self.values)

    def exceeds(self, limit: float) -> bool:
        """Whether chance alone does not explain a rate above `limit` per 1,000."""
        return self.interval[0] > limit

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.per_1000:.2g} per 1,000 values (95%: {low:.2g} to {high:.2g})"


@dataclass(frozen=True)
class Spikes:
    """The spikes of a run that are its own: those of loss and gradient norm at the same place are one.

    `brief` were back within 3 values and `lasting` later; `slow` counts those that took more than 20. `open` is the
    first tall one that is not back at the end. `batches` counts those that other runs have too.
    """

    first: Event | None
    brief: Rate
    lasting: Rate
    slow: int
    open: Event | None
    batches: int

    @property
    def all(self) -> Rate:
        return Rate(self.brief.count + self.lasting.count, self.brief.values)

    @property
    def sick(self) -> bool:
        return self.slow > 0 or self.lasting.exceeds(LASTING_LIMIT) or self.all.exceeds(ALL_LIMIT)


def spikes_of(log: Log, events: Sequence[Event]) -> Spikes:
    """Count the spikes of `events`, without those that are batches. A loss that is not finite for a while counts as one
    from which the run recovered slowly."""
    stride, last = log.stride, int(log.step[-1])
    own = [event for event in events if event.kind in SPIKES and event.cause is None]
    lost = [event for event in events if event.kind == "nonfinite_step" and event.signal == "loss"]
    rows, unfinished = [], None
    for cluster in _clusters(own, MERGE * stride):
        rows.append(max(SLOW if event.recovery is None else event.recovery / stride for event in cluster))
        for event in cluster:
            # One that began with the last values says nothing yet.
            if event.recovery is None and event.step <= last - BRIEF * stride and is_tall(event):
                unfinished = unfinished or event
    brief = sum(away <= BRIEF for away in rows)
    return Spikes(
        first=own[0] if own else None,
        brief=Rate(brief, len(log)),
        lasting=Rate(len(rows) - brief, len(log)),
        slow=sum(away > SLOW for away in rows) + len(lost),
        open=unfinished,
        batches=sum(event.cause == "batch" for event in events),
    )


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
        return event.height >= TALL_NATS
    return event.value >= TALL_TIMES * (event.value - event.height)
