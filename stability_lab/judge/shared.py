"""Spikes at the same steps in several runs: batches of the data they share, and no instability of any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stability_lab.judge.events import SPIKES, Event
from stability_lab.judge.log import Log
from stability_lab.judge.rates import SLOW

# Spikes so many steps apart are at the same step: an odd batch may last for a few, and a gradient norm lags by one.
NEAR_STEPS = 2


@dataclass(frozen=True)
class SharedSpike:
    """A spike that `runs` of the `of` runs that were logged at its step have."""

    step: int
    runs: int
    of: int


def shared_spikes(
    logs: Sequence[Log], events: Sequence[Sequence[Event]]
) -> tuple[list[SharedSpike], list[list[Event]]]:
    """The spikes that at least half of the runs share, and two of them at least, and the events with `batch` as cause.

    Runs count that were logged at the step. A spike from which a run recovers slowly is its own, whatever began it.
    """
    spans = [(int(log.step[0]), int(log.step[-1])) for log in logs]
    steps = [sorted({event.step for event in found if event.kind in SPIKES}) for found in events]
    shared: list[SharedSpike] = []
    for step in sorted({step for found in steps for step in found}):
        there = [i for i, (first, last) in enumerate(spans) if first <= step <= last]
        having = [i for i in there if any(abs(step - other) <= NEAR_STEPS for other in steps[i])]
        if len(having) < max(2, len(there) / 2) or (shared and step - shared[-1].step <= NEAR_STEPS):
            continue
        shared.append(SharedSpike(step, len(having), len(there)))

    def is_batch(event: Event, log: Log) -> bool:
        if event.kind not in SPIKES or event.recovery is None or event.recovery > SLOW * log.stride:
            return False
        return any(abs(event.step - each.step) <= 2 * NEAR_STEPS for each in shared)

    return shared, [
        [replace(event, cause="batch") if is_batch(event, log) else event for event in found]
        for log, found in zip(logs, events, strict=True)
    ]
