"""Intervals, tests and sample sizes for means over seeds. NaN never enters: callers leave diverged runs out.

Everything is two-sided at 95% unless said otherwise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import stats

LEVEL = 0.95
POWER = 0.8
# Beyond this a power calculation says only that the difference is no longer worth looking for.
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Mean:
    """Mean of `n` values; `low` and `high` are None for one value, which has no interval."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        return None if self.high is None else self.high - self.value


@dataclass(frozen=True)
class Difference:
    """Mean of a - b. `p` and the interval are None with one pair. `spread`: standard deviation of a - b over pairs,
    else the pooled one of a and b. `family` adds what depends on the other differences: their number `tests`, `p_holm`
    and `seeds_needed`, with as many of which in each arm a test would have 80% power for a difference of this size,
    were it the true one; None without a p, where the difference is significant, or above 1,000.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    n: int
    method: Literal["paired", "welch"]
    spread: float | None = None
    p_holm: float | None = None
    seeds_needed: int | None = None
    tests: int = 1

    @property
    def identical(self) -> bool:
        """All pairs are equal: with the same batches a sign that nothing acts."""
        return self.method == "paired" and self.value == 0 and self.low in (0, None)

    @property
    def significant(self) -> bool | None:
        """None where there was no test."""
        return None if self.p_holm is None else self.p_holm <= 1 - LEVEL


# Losses of 1e308 have an infinite sum, and that is what is shown.
_extremes = np.errstate(over="ignore", invalid="ignore")


@_extremes
def t_interval(values: Sequence[float]) -> Mean:
    """Mean with Student's interval. Raises `ValueError` for no value or one that is not finite."""
    x = _finite(values)
    value, low, high, *_ = _student(x)
    return Mean(value, low, high, len(x))


@_extremes
def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """a - b over pairs, with Student's paired test. Raises `ValueError` unless as many values, one at least."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are no pairs")
    value, low, high, p, spread = _student(_finite(a) - _finite(b))
    return Difference(value, low, high, p, len(a), "paired", spread)


@_extremes
def welch_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """a - b of unpaired values with unequal variances (Welch). No interval unless both have two values."""
    x, y = _finite(a), _finite(b)
    value, n = float(x.mean() - y.mean()), min(len(x), len(y))
    spread = math.sqrt((float(x.var(ddof=1)) + float(y.var(ddof=1))) / 2) if n > 1 else None
    tested = _tested(lambda: stats.ttest_ind(x, y, equal_var=False), value, spread, n)
    return Difference(value, *tested, n, "welch", spread)


def _student(x: np.ndarray) -> tuple[float, float | None, float | None, float | None, float]:
    """Mean, ends of its interval, p of the test against 0, and standard deviation."""
    value, spread = float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return (value, *_tested(lambda: stats.ttest_1samp(x, 0.0), value, spread, len(x)), spread)


def _tested(
    test: Callable[[], Any], value: float, spread: float | None, n: int
) -> tuple[float | None, float | None, float | None]:
    """Ends of the interval and p by `test`. One value has none; without any spread the t statistic is not defined."""
    if n < 2:
        return None, None, None
    if spread == 0:
        return value, value, float(value == 0)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of values that are nearly equal
        result = test()
        low, high = result.confidence_interval(LEVEL)
    return float(low), float(high), float(result.pvalue)


def difference_by_seed(own: Mapping[Any, float], other: Mapping[Any, float], paired: bool) -> Difference | None:
    """own - other of values by seed: over the seeds that both have where they are pairs, else by Welch."""
    common = [seed for seed in own if seed in other]
    if paired and common:
        return paired_difference([own[seed] for seed in common], [other[seed] for seed in common])
    return welch_difference(list(own.values()), list(other.values())) if own and other else None


def family(differences: Sequence[Difference | None], planned: int = 0) -> list[Difference | None]:
    """The same differences as tests of one family: p by Holm's rule, and the seeds that such a test would need.

    Holm's first step tests at 5% divided by the number of tests, and the seeds are those for that level: enough
    whatever the other differences turn out to be. Of `planned` tests those that are not there count as not significant,
    so that a missing run makes no other difference clearer.
    """
    ps = [d.p if d else None for d in differences]
    tests = max(1, planned, sum(p is not None for p in ps))
    adjusted = holm(ps, tests)
    return [d and _in_family(d, p, tests) for d, p in zip(differences, adjusted, strict=True)]


def _in_family(difference: Difference, p: float | None, tests: int) -> Difference:
    found = replace(difference, p_holm=p, tests=tests)
    if found.significant is not False or not difference.spread:
        return found
    seeds = paired_seeds if difference.method == "paired" else unpaired_seeds
    return replace(found, seeds_needed=seeds(difference.value, difference.spread, tests=tests))


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests of |mean of a - b| < `margin`. `p` is the larger of the two; `low` and `high` are the 95%
    interval of the difference, None with one pair, as is `p`. `pairs_needed`: so many show equality with 80% chance,
    were the true difference 0; None where it is shown, or more than 1,000 would be needed.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    margin: float
    n: int
    pairs_needed: int | None = None


def equivalence(a: Sequence[float], b: Sequence[float], margin: float) -> Equivalence:
    """Are pairs equal within +-`margin`, in the unit of the values? Raises `ValueError` unless as many, and a margin
    above 0."""
    if not margin > 0:
        raise ValueError(f"margin is {margin}, but must be above 0")
    d = paired_difference(a, b)
    if d.low is None or d.high is None or d.spread is None:
        return Equivalence(d.value, None, None, None, margin, d.n)
    if d.spread == 0:
        return Equivalence(d.value, d.low, d.high, 0.0 if abs(d.value) < margin else 1.0, margin, d.n)
    # The nearer end of the margin decides.
    p = float(stats.t.sf((margin - abs(d.value)) / (d.spread / math.sqrt(d.n)), d.n - 1))
    size, needed = margin / d.spread, None
    if p > 1 - LEVEL:
        needed = _first(lambda n: _tost_power(size * math.sqrt(n), n - 1) >= POWER)
    return Equivalence(d.value, d.low, d.high, p, margin, d.n, needed)


def _tost_power(noncentrality: float, df: float) -> float:
    """Chance that both one-sided tests reject where the true difference is 0 and `noncentrality` the margin over the
    standard error. They cannot both fail, so that their chances of failing add."""
    return max(0.0, 2 * _beyond(float(stats.t.ppf(LEVEL, df)), df, noncentrality) - 1)


def holm(ps: Sequence[float | None], tests: int = 0) -> list[float | None]:
    """p values adjusted for their number, or for `tests` where that is more, by Holm's step-down rule; None stays None
    and does not count."""
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    tests, highest = max(tests, len(known)), 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, (tests - rank) * p))
        adjusted[i] = highest
    return adjusted


def paired_seeds(effect: float, spread: float, power: float = POWER, tests: int = 1) -> int | None:
    """Pairs needed to find a true mean difference `effect` of standard deviation `spread`, at 5% divided by `tests`;
    None above 1,000."""
    if spread <= 0:
        return None
    return _smallest_n(abs(effect) / spread, lambda n: n - 1, math.sqrt, power, tests)


def unpaired_seeds(effect: float, spread: float, power: float = POWER, tests: int = 1) -> int | None:
    """Values needed in each of two equal samples; None above 1,000."""
    if spread <= 0:
        return None
    return _smallest_n(abs(effect) / spread, lambda n: 2 * n - 2, lambda n: math.sqrt(n / 2), power, tests)


def t_power(noncentrality: float, df: float, level: float = LEVEL) -> float:
    """Chance that a two-sided t-test finds an effect of this non-centrality."""
    limit = _critical(df, level)
    other_side = float(stats.nct.cdf(-limit, df, noncentrality))
    # scipy gives NaN where the other side is too far away to be reached.
    return _beyond(limit, df, noncentrality) + (0.0 if math.isnan(other_side) else other_side)


def _beyond(limit: float, df: float, noncentrality: float) -> float:
    """Chance that a non-central t exceeds `limit`; from 1e12 on scipy gives NaN, and a million says the same."""
    return float(stats.nct.sf(limit, df, min(noncentrality, 1e6)))


def _smallest_n(
    size: float, df: Callable[[int], int], root: Callable[[int], float], power: float, tests: int
) -> int | None:
    """`df` and `root` of n are the degrees of freedom and what n multiplies the effect size by."""
    level = 1 - (1 - LEVEL) / tests
    return None if size == 0 else _first(lambda n: t_power(size * root(n), df(n), level) >= power)


def _first(enough: Callable[[int], bool]) -> int | None:
    """The smallest number of seeds, from 2 on, for which `enough` holds; None above 1,000."""
    if not enough(MOST_SEEDS):
        return None
    low, high = 2, MOST_SEEDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _critical(df: float, level: float = LEVEL) -> float:
    return float(stats.t.ppf((1 + level) / 2, df))


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"{x.size} values, all of which must be finite")
    return x
