"""Which run says most about the learning rates of each arm: a sequential design over a fixed grid, as pure functions.

A ramp, whose rate rises through one run, says where to begin. Then each arm's largest stable rate is bracketed by
doubling steps and bisection; its best rate is the lowest mean loss, with both neighbours tried; its usable range is
where the loss stays within 0.02 nats of that. Within a phase the arm goes first whose interval is widest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from stability_lab.judge.lr_sensitivity import USABLE_NATS

LEARNED = frozenset(("stable", "spiky"))
_CALM = LEARNED | {"undecided"}
_UNDERTRAINED = _CALM | {"no_learning"}
# Rates up to the edge of which every seed is tried: a seed may fail one below where the others do not.
CONFIRMED = 2
_STRIDE = 4  # rungs to go down by before there is a bracket


@dataclass(frozen=True)
class Result:
    """`outcome` is the verdict; `loss` the final one, None where it is not finite."""

    outcome: str
    loss: float | None


@dataclass(frozen=True)
class Design:
    """`rates` ascend; all arms have the same seeds, of which up to `width` train at once."""

    arms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    width: int = 1

    @property
    def full(self) -> int:
        """Runs of the whole grid."""
        return len(self.arms) * len(self.rates) * len(self.seeds)


@dataclass(frozen=True)
class Trial:
    """Runs of one arm; `rung` is the place of their rate in the grid, None for the ramp."""

    arm: str
    rung: int | None
    seeds: tuple[int, ...]


Known = Mapping[tuple[str, int, int], Result]  # by arm, rung and seed
Ramps = Mapping[str, float | None]  # by arm: the rate at which the ramp failed, None where it did not


def next_job(design: Design, known: Known, ramps: Ramps) -> Trial | None:
    """The runs that say most now; None where nothing is left to find."""
    for arm in design.arms:
        if arm not in ramps:
            return Trial(arm, None, design.seeds[:1])
    climbs = [Climb(design, arm, known, ramps[arm]) for arm in design.arms]
    for phase in (Climb.edge, Climb.best, Climb.usable):
        asked = [(found, climb.arm) for climb in climbs if (found := phase(climb)) is not None]
        if asked:
            step, arm = max(asked, key=lambda one: one[0].width)
            return Trial(arm, step.rung, step.seeds[: design.width])
    return None


class _Step(NamedTuple):
    """What an arm would try next, and how many rungs wide the interval is that it narrows."""

    width: int
    rung: int
    seeds: tuple[int, ...]


class Climb:
    """What is known of one arm. `low` and `high` are rungs: the largest stable rate lies in [low, high); `low` is -1
    where no rate is known to be stable, and `high` is the length of the grid where none is known to fail."""

    def __init__(self, design: Design, arm: str, known: Known, ramp: float | None):
        self.design, self.arm = design, arm
        self.tried: dict[int, dict[int, Result]] = {}
        for (name, rung, seed), result in sorted(known.items()):
            if name == arm:
                self.tried.setdefault(rung, {})[seed] = result
        outcomes = {rung: {one.outcome for one in results.values()} for rung, results in self.tried.items()}
        means = {rung: fmean(found.values()) for rung in self.tried if (found := self._losses(rung))}
        lowest = min((rung for rung in means if outcomes[rung] & LEARNED), key=means.__getitem__, default=-1)
        # An undecided run says nothing. One that did not learn below the best rate is undertrained, above it unstable.
        stable = {
            rung: each <= (_UNDERTRAINED if rung < lowest else _CALM)
            for rung, each in outcomes.items()
            if each != {"undecided"}
        }
        self.high = min((rung for rung, good in stable.items() if not good), default=len(design.rates))
        self.low = max((rung for rung in stable if rung < self.high), default=-1)
        self.stable_above = tuple(rung for rung, good in sorted(stable.items()) if good and rung > self.high)
        self.start = _start(design.rates, ramp)

    def edge(self) -> _Step | None:
        """Narrow the bracket of the largest stable rate; None once its ends are neighbours and every seed agrees."""
        low, high, last = self.low, self.high, len(self.design.rates)
        if not self.tried:
            return self._step(last, self.start)
        wanted = (low + high) // 2
        if low < 0:
            wanted = high - max(1, self.start - high + 1)
        elif high == last:
            wanted = low + max(1, low - self.start + 1)
        if free := [rung for rung in range(low + 1, high) if rung not in self.tried]:
            return self._step(high - low, min(free, key=lambda rung: abs(rung - wanted)))
        for rung in sorted((rung for rung in self.tried if rung <= low), reverse=True)[:CONFIRMED]:
            if self._missing(rung):
                return self._step(1, rung)
        # One below the edge is tried as well: where a seed fails there, the edge was no edge.
        if low > 0 and low - 1 not in self.tried:
            return self._step(1, low - 1)
        return None

    def best(self) -> _Step | None:
        """Narrow the interval of the lowest loss; None once both neighbours and all of its seeds are tried."""
        best = self.best_rung()
        if best is None:
            return None
        below = max((rung for rung in self.tried if rung < best), default=None)
        above = min((rung for rung in (*self.tried, self.high) if rung > best), default=len(self.design.rates))
        if below is None and best > 0:
            return self._probe(best, max(0, best - _STRIDE))
        gaps = [(above - best, (best + above) // 2)]
        gaps += [(best - below, (below + best) // 2)] if below is not None else []
        width, rung = max(gaps)
        if width > 1:
            return self._probe(width, rung)
        return self._step(1, best) if self._missing(best) else None

    def usable(self) -> _Step | None:
        """Narrow the ends of the usable range; None once the next rung on each side is out of it or of the grid."""
        span = self.usable_rungs()
        if span is None:
            return None
        first, last = span
        out = max((rung for rung in self.tried if rung < first), default=-1)
        if first - out > 1:
            return self._probe(first - out, (out + first) // 2 if out >= 0 else max(0, first - _STRIDE))
        out = min((rung for rung in (*self.tried, self.high) if rung > last), default=len(self.design.rates))
        return self._probe(out - last, (last + out) // 2) if out - last > 1 else None

    def best_rung(self) -> int | None:
        """The rung with the lowest mean loss, over the seeds that both of two have."""
        best = None
        for rung in self._stable_rungs():
            if best is None or self._gap(rung, best) < 0:
                best = rung
        return best

    def usable_rungs(self) -> tuple[int, int] | None:
        """First and last rung around the best one whose loss is within 0.02 nats of it, as far as they were tried."""
        best = self.best_rung()
        if best is None:
            return None
        near = [rung for rung in self._stable_rungs() if self._gap(rung, best) <= USABLE_NATS]
        far = [rung for rung in self.tried if rung not in near]
        under, over = max((r for r in far if r < best), default=-1), min((r for r in far if r > best), default=math.inf)
        inside = [rung for rung in near if under < rung < over]
        return inside[0], inside[-1]

    @property
    def runs(self) -> int:
        return sum(map(len, self.tried.values()))

    def _stable_rungs(self) -> list[int]:
        """Stable ones up to the edge that have a loss."""
        return [rung for rung in sorted(self.tried) if rung <= self.low and self._losses(rung)]

    def _losses(self, rung: int) -> dict[int, float]:
        return {seed: one.loss for seed, one in self.tried[rung].items() if one.loss is not None}

    def _gap(self, rung: int, other: int) -> float:
        own, its = self._losses(rung), self._losses(other)
        both = own.keys() & its.keys()
        return math.fsum(own[seed] - its[seed] for seed in both) / len(both) if both else math.inf

    def _missing(self, rung: int) -> tuple[int, ...]:
        return tuple(seed for seed in self.design.seeds if seed not in self.tried.get(rung, ()))

    def _probe(self, width: int, rung: int) -> _Step:
        """One seed says enough, because the losses of one seed are compared."""
        return _Step(width, rung, self._missing(rung)[:1])

    def _step(self, width: int, rung: int) -> _Step:
        return _Step(width, rung, self._missing(rung))


def _start(rates: Sequence[float], ramp: float | None) -> int:
    """The rung below the rate at which the ramp failed; the last one where it did not."""
    return max(0, sum(rate < ramp for rate in rates) - 1) if ramp is not None else len(rates) - 1
