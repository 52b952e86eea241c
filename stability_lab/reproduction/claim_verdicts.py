"""Verdicts on a published statement, as pure functions of what we measured.

A statement about two arms has a direction, the sign of a - b. Swapping the arms of a measurement turns the verdict
round: `same sign` becomes `opposite sign`, and `same sign and resolved` becomes `contradicts`. A statement of equality
has no direction. Two one-sided tests show it within a margin that was chosen before the data; it then counts as
`same sign and resolved`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from stability_lab.compare.statistics import (
    LEVEL,
    MOST_SEEDS,
    Difference,
    equivalence,
    family,
    tested,
)
from stability_lab.compare.tables import p_text
from stability_lab.judge.lr_sensitivity import Bracket, ratio_interval
from stability_lab.judge.spikes import needed_steps

AGREES = "agrees"
SAME_RESOLVED = "same sign and resolved"
SMALLER = "smaller than published"
SAME = "same sign but not resolved"
OPPOSITE = "opposite sign but not resolved"
NOT_RESOLVABLE = "not resolvable at this scale"
CONTRADICTS = "contradicts"
ABSENT = "mechanism absent"
NOT_STATED = "not the paper's statement"
VERDICTS = (AGREES, SAME_RESOLVED, SMALLER, SAME, OPPOSITE, NOT_RESOLVABLE, CONTRADICTS, ABSENT, NOT_STATED)


@dataclass(frozen=True)
class Finding:
    """`value` with its 95% interval, if there is one; `detail` adds what a reader must know."""

    verdict: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    detail: str = ""


def exact(ours: float, printed: float, tolerance: float) -> Finding:
    """A number that follows from a formula. `tolerance` is half of the last printed digit, or the rounding that the
    statement names; NaN contradicts."""
    return Finding(AGREES if abs(ours - printed) <= tolerance else CONTRADICTS, ours)


def signed(difference: Difference, direction: int, effect: float | None = None) -> Finding:
    """The sign of a - b against the published `direction`, 1 or -1.

    A difference outside any `family` is tested alone. `effect` is the published difference in the same unit. If a test
    excludes it, and not 0, ours is smaller. If our seeds, spread and number of tests could not show even it, the sign
    is not resolvable.
    """
    d = difference
    if d.p_holm is None:
        d = family([d])[0] or d
    interval = (d.value, d.low, d.high)
    same = d.value * direction > 0
    if d.value == 0:
        return Finding(NOT_RESOLVABLE, *interval, "the two do not differ at all")
    if d.p_holm is None:
        return Finding(_side(same, resolved=False), *interval, "one seed: no test")
    chance = _p(d.p_holm, d.tests)
    if d.significant:
        return Finding(_side(same, resolved=True), *interval, chance)
    if effect:
        p = tested(d.value - effect, (d.spread or 0.0) / math.sqrt(d.n), d.df or 0.0)[2]
        if p is not None and p * d.tests <= 1 - LEVEL:  # as 0 is not excluded, ours is the smaller one
            excluded = _p(p * d.tests, d.tests, "Bonferroni")
            return Finding(SMALLER, *interval, f"{chance}; the published {effect:.3g} is excluded with {excluded}")
        needed = d.seeds_for(effect)
        if needed is None or needed > d.n:
            return Finding(NOT_RESOLVABLE, *interval, f"{chance}; the published difference would take {_seeds(needed)}")
    elif d.seeds_needed is None:
        return Finding(NOT_RESOLVABLE, *interval, f"{chance}; a difference of this size would take {_seeds(None)}")
    return Finding(_side(same, resolved=False), *interval, f"{chance}; it would take {_seeds(d.seeds_needed)}")


def _side(same: bool, resolved: bool) -> str:
    """The verdict on a sign: is it the published one, and is it more than chance?"""
    if resolved:
        return SAME_RESOLVED if same else CONTRADICTS
    return SAME if same else OPPOSITE


def equal(a: Sequence[float], b: Sequence[float], margin: float) -> Finding:
    """Pairs `a`, `b` that the statement calls equal: two one-sided tests within +-`margin`."""
    found = equivalence(a, b, margin)
    interval = (found.value, found.low, found.high)
    if found.p is None or found.low is None or found.high is None:
        return Finding(NOT_RESOLVABLE, *interval, "one seed: no test")
    if found.p <= 1 - LEVEL:
        return Finding(SAME_RESOLVED, *interval, f"equal within {margin:g}")
    if found.low > margin or found.high < -margin:
        return Finding(CONTRADICTS, *interval, f"different by more than {margin:g}")
    if found.pairs_needed is not None and found.pairs_needed <= found.n:
        return Finding(NOT_RESOLVABLE, *interval, f"neither within {margin:g} nor beyond it")
    return Finding(NOT_RESOLVABLE, *interval, f"equality within {margin:g} would take {_seeds(found.pairs_needed)}")


def printed_difference(a: float, b: float, half: float, direction: int) -> Finding:
    """A normal test of two printed values, each with a 95% half-width; it needs no data of ours."""
    error = half / float(stats.norm.ppf((1 + LEVEL) / 2)) * math.sqrt(2)
    value, wide = a - b, half * math.sqrt(2)
    p = float(2 * stats.norm.sf(abs(value) / error))
    verdict = _side(value * direction > 0, p <= 1 - LEVEL)
    return Finding(verdict, value, value - wide, value + wide, f"{abs(value) / error:.1f} standard errors")


def spike_rates(
    difference: Difference | None, counts: tuple[tuple[int, int], tuple[int, int]], published: tuple[float, float]
) -> Finding:
    """Spike scores of two arms in percent, against the two published ones.

    `counts`: spikes and scored steps of each arm, over its runs. With too few steps for the published rates (80% power;
    spikes cluster, so this is the least) the verdict is `not resolvable`. Otherwise the sign comes from `difference`,
    in which each run is one value. Runs often have one spike or none, and then vary less than chance would: p is the
    larger one of that difference's and of Fisher's exact test on the steps.
    """
    p_a, p_b = (rate / 100 for rate in published)
    needed, d = needed_steps(p_a, p_b), difference
    (spikes_a, steps_a), (spikes_b, steps_b) = counts
    words = f"{spikes_a} spike{'s' * (spikes_a != 1)} in {steps_a:,} scored steps against {spikes_b} in {steps_b:,}"
    few = f"{words}; the published rates would take {needed:,} in each arm"
    if d is None:
        return Finding(NOT_RESOLVABLE, detail=few)
    varies = d.spread is not None and d.spread > 1e-9
    interval = (d.value, d.low if varies else None, d.high if varies else None)
    if min(steps_a, steps_b) < needed:
        return Finding(NOT_RESOLVABLE, *interval, few)
    if d.value == 0:
        return Finding(NOT_RESOLVABLE, *interval, words)
    same = (d.value > 0) == (p_a > p_b)
    if d.p is None:
        return Finding(_side(same, resolved=False), *interval, f"{words}; one seed: no test")
    steps = [[spikes_a, steps_a - spikes_a], [spikes_b, steps_b - spikes_b]]
    p = max(d.p, float(stats.fisher_exact(steps).pvalue))  # pyright: ignore[reportAttributeAccessIssue]
    return Finding(_side(same, p <= 1 - LEVEL), *interval, f"{words}; {_p(p, 1)}")


def stable_rates(a: Bracket, b: Bracket, direction: int, seeds: int) -> Finding:
    """Largest stable learning rates on one grid, each known to lie between two of its rates; `low` and `high` are the
    ends of their ratio. The order is resolved if at some rate all seeds of one arm are stable and none of the other:
    a bracket ends at the first rate with an unstable seed, and one run of three is chance. This is no test, without p.
    """
    low, high = ratio_interval(a, b)
    words = f"{a} against {b}"
    above, below = low >= 1, high <= 1
    if above == below:
        return Finding(NOT_RESOLVABLE, None, low, high, f"{words}: a finer or longer grid is needed")
    same = above == (direction > 0)
    upper, lower = (a, b) if above else (b, a)
    odd = [name for name, bracket in (("the first", a), ("the second", b)) if not bracket.monotone]
    most = min((other for own, other in zip(upper.fraction, lower.fraction, strict=True) if own == 1), default=1.0)
    why = None
    if seeds < 2:
        why = "one seed"
    elif odd:
        why = f"{' and '.join(odd)} is stable again above an unstable rate"
    elif most > 0:
        why = f"where all seeds of one are stable, so are {most:.0%} of the other's"
    return Finding(_side(same, why is None), None, low, high, f"{words}; {why}" if why else words)


def _p(corrected: float, tests: int, rule: str = "Holm") -> str:
    """The p that decided. The interval printed beside it is that of the difference alone."""
    return f"p {p_text(corrected)}" + (f" by {rule}, {tests} tests" if tests > 1 else "")


def _seeds(needed: int | None) -> str:
    return f"more than {MOST_SEEDS:,} seeds" if needed is None else f"about {needed} seeds"
