"""Spikes at the same steps in several runs: batches of the data they share, and no instability of any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stability_lab.judge.events import SPIKES, Event
from stability_lab.judge.log import Log
from stability_lab.judge.rates import SLOW

# Spikes so many steps apart are at the same step: some loggers count from 0 and some from 1.
NEAR_STEPS = 1


@dataclass(frozen=True)
class SharedSpike:
    """A spike that `runs` of the `of` runs that were logged at its step have."""

    step: int
    runs: int
    of: int


@dataclass(frozen=True)
class Sharing:
    """The `spikes` that runs share, how many of them `chance` alone would have made, and which logs are `copies` of an
    earlier one, by their positions."""

    spikes: list[SharedSpike]
    chance: float
    copies: dict[int, int]


def shared_spikes(logs: Sequence[Log], events: Sequence[Sequence[Event]]) -> tuple[Sharing, list[list[Event]]]:
    """The spikes that at least half of the runs share, and two of them at least, and the events with `batch` as cause.

    Runs count that were logged at the step, and of equal logs one. None is shared where chance alone makes as many: the
    spikes of each run then lie at random. A spike from which a run recovers slowly is its own, whatever began it.
    """
    if len(logs) < 2:
        return Sharing([], 0.0, {}), [list(found) for found in events]
    from scipy.special import bdtrc  # a fifth of a second, for several runs alone

    copies = _copies(logs)
    runs = [i for i in range(len(logs)) if i not in copies]
    spans = {i: (int(logs[i].step[0]), int(logs[i].step[-1])) for i in runs}
    steps = {i: sorted({event.step for event in events[i] if event.kind in SPIKES}) for i in runs}
    reach = 2 * NEAR_STEPS + 1
    hit = {i: min(1.0, reach * len(steps[i]) / (last - first + 1)) for i, (first, last) in spans.items()}
    shared: list[SharedSpike] = []
    chance = 0.0
    for step in sorted({step for found in steps.values() for step in found}):
        there = [i for i, (first, last) in spans.items() if first <= step <= last]
        having = [i for i in there if any(abs(step - other) <= NEAR_STEPS for other in steps[i])]
        least = max(2, -(-len(there) // 2))
        if len(there) > 1:
            others = float(np.mean([hit[i] for i in there]))
            chance += float(bdtrc(least - 2, len(there) - 1, others))
        if len(having) >= least and not (shared and step - shared[-1].step <= NEAR_STEPS):
            shared.append(SharedSpike(step, len(having), len(there)))
    if len(shared) <= chance + 3 * chance**0.5:
        shared = []

    def is_batch(event: Event, log: Log) -> bool:
        if event.kind not in SPIKES or event.recovery is None or event.recovery > SLOW * log.stride:
            return False
        return any(abs(event.step - each.step) <= 2 * NEAR_STEPS for each in shared)

    return Sharing(shared, chance, copies), [
        [replace(event, cause="batch") if is_batch(event, log) else event for event in found]
        for log, found in zip(logs, events, strict=True)
    ]


def _copies(logs: Sequence[Log]) -> dict[int, int]:
    """Logs that equal an earlier one in all steps and signals."""
    copies: dict[int, int] = {}
    for i, log in enumerate(logs):
        for j in range(i):
            if j not in copies and _equal(log, logs[j]):
                copies[i] = j
                break
    return copies


def _equal(a: Log, b: Log) -> bool:
    if a.signals.keys() != b.signals.keys() or not np.array_equal(a.step, b.step):
        return False
    return all(np.array_equal(a.signals[name], b.signals[name], equal_nan=True) for name in a.signals)
