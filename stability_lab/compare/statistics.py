"""Intervals, tests and sample sizes for means over seeds. NaN never enters: callers leave diverged runs out.

Everything is two-sided at 95% unless said otherwise. `contrasts.py` has the tests between arms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import stdtr, stdtrit

LEVEL = 0.95
POWER = 0.8
# Beyond this a power calculation says only that the difference is no longer worth looking for.
MOST_SEEDS = 1000
# With fewer degrees of freedom, or for a difference below its standard error, a number of seeds would be a pure guess.
FEWEST_FREE = 4

Method = Literal["paired", "welch"]


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
    """Mean of a - b. `p` and the interval are None with one pair. `spread` is the standard error times the root of `n`:
    the standard deviation of a - b over pairs, or what stands for it; `df` are its degrees of freedom. `family` adds
    `p_holm` and the number `tests` of all differences that are tested together.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    n: int
    method: Method
    spread: float | None = None
    df: float | None = None
    p_holm: float | None = None
    tests: int = 1

    @property
    def identical(self) -> bool:
        """All pairs are equal: with the same batches a sign that nothing acts."""
        return self.method == "paired" and self.value == 0 and self.low in (0, None)

    @property
    def significant(self) -> bool | None:
        """None where there was no test."""
        return None if self.p_holm is None else self.p_holm <= 1 - LEVEL

    def seeds_for(self, effect: float, spread: float | None = None) -> int | None:
        """Seeds in each arm that find a true difference `effect` with 80% chance, among as many tests and at this
        spread or another; None above 1,000.

        Holm's first step tests at 5% divided by the number of tests, so that they are enough whatever the other
        differences turn out to be.
        """
        if not self.spread or not self.df:
            return None
        return seeds_for(effect, spread or self.spread, self.df / (self.n - 1), tests=self.tests)

    @property
    def seeds_needed(self) -> int | None:
        """`seeds_for` a difference of the size that was seen; None where it is significant or was not tested."""
        return None if self.significant in (None, True) else self.seeds_for(self.value)

    @property
    def seeds_range(self) -> tuple[int, int] | None:
        """`seeds_needed` at both ends of the 95% interval of the spread (chi square); None where that would be a guess:
        below four degrees of freedom, for a difference below its standard error, or where an end is above 1,000."""
        if self.significant in (None, True) or not self.spread or not self.df or self.df < FEWEST_FREE:
            return None
        if abs(self.value) < self.spread / math.sqrt(self.n):
            return None
        tails = ((1 + LEVEL) / 2, (1 - LEVEL) / 2)
        ends = [self.spread * math.sqrt(self.df / float(stats.chi2.ppf(tail, self.df))) for tail in tails]
        few, many = (self.seeds_for(self.value, spread) for spread in ends)
        return None if few is None or many is None else (few, many)


# Losses of 1e308 have an infinite sum, and that is what is shown.
extremes = np.errstate(over="ignore", invalid="ignore")


@extremes
def t_interval(values: Sequence[float]) -> Mean:
    """Mean with Student's interval. Raises `ValueError` for no value or one that is not finite."""
    x = finite(values)
    value, spread = _mean_and_spread(x)
    return Mean(value, *tested(value, spread / math.sqrt(len(x)), len(x) - 1)[:2], len(x))


@extremes
def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """a - b over pairs, with Student's paired test. Raises `ValueError` unless as many values, one at least."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are no pairs")
    x = finite(a) - finite(b)
    value, spread = _mean_and_spread(x)
    n = len(x)
    return Difference(value, *tested(value, spread / math.sqrt(n), n - 1), n, "paired", spread, n - 1)


def _mean_and_spread(x: np.ndarray) -> tuple[float, float]:
    return float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else 0.0


def tested(value: float, error: float, df: float) -> tuple[float | None, float | None, float | None]:
    """Ends of the interval and p of Student's test against 0. Without a degree of freedom there are none; without any
    spread the t statistic is not defined."""
    if df <= 0:
        return None, None, None
    if error == 0:
        return value, value, float(value == 0)
    half = float(stdtrit(df, (1 + LEVEL) / 2)) * error
    return value - half, value + half, float(2 * stdtr(df, -abs(value) / error))


def family(differences: Sequence[Difference | None], planned: int = 0) -> list[Difference | None]:
    """The same differences as tests of one family: p by Holm's rule. Of `planned` tests those that are not there count
    as not significant, so that a missing run makes no other difference clearer.
    """
    ps = [d.p if d else None for d in differences]
    tests = max(1, planned, sum(p is not None for p in ps))
    adjusted = holm(ps, tests)
    return [d and replace(d, p_holm=p, tests=tests) for d, p in zip(differences, adjusted, strict=True)]


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


def share_interval(k: int, n: int) -> tuple[float, float]:
    """The exact 95% interval of a share of which `k` in `n` were seen (Clopper and Pearson, 1934)."""
    if not 0 <= k <= n or not n:
        raise ValueError(f"{k} of {n} is no share")
    tail = (1 - LEVEL) / 2
    low = 0.0 if k == 0 else float(stats.beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k == n else float(stats.beta.ppf(1 - tail, k + 1, n - k))
    return low, high


def fisher(a: tuple[int, int], b: tuple[int, int]) -> float:
    """p of Fisher's exact test that two shares, each as (k, n), are one: all tables count that are no likelier."""
    shown, total = a[0] + b[0], a[1] + b[1]
    chances = stats.hypergeom.pmf(np.arange(a[1] + 1), total, shown, a[1])
    return min(1.0, float(chances[chances <= chances[a[0]] * (1 + 1e-7)].sum()))


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


def seeds_for(effect: float, spread: float, df: float = 1.0, power: float = POWER, tests: int = 1) -> int | None:
    """Seeds needed to find a true mean difference `effect`, at 5% divided by `tests`; None above 1,000.

    `spread` is the root of n times the standard error with n seeds, and `df` the degrees of freedom that each seed
    beyond the first gives: 1 for pairs, whose standard deviation is the spread; 2 for two independent samples, with
    the root of 2 times theirs.
    """
    if spread <= 0 or effect == 0:
        return None
    level, size = 1 - (1 - LEVEL) / tests, abs(effect) / spread
    return _first(lambda n: t_power(size * math.sqrt(n), df * (n - 1), level) >= power)


def t_power(noncentrality: float, df: float, level: float = LEVEL) -> float:
    """Chance that a two-sided t-test finds an effect of this non-centrality."""
    limit = _critical(df, level)
    other_side = float(stats.nct.cdf(-limit, df, noncentrality))
    # scipy gives NaN where the other side is too far away to be reached.
    return _beyond(limit, df, noncentrality) + (0.0 if math.isnan(other_side) else other_side)


def _beyond(limit: float, df: float, noncentrality: float) -> float:
    """Chance that a non-central t exceeds `limit`; from 1e12 on scipy gives NaN, and a million says the same."""
    return float(stats.nct.sf(limit, df, min(noncentrality, 1e6)))


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
    return float(stdtrit(df, (1 + level) / 2))


def finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"{x.size} values, all of which must be finite")
    return x
