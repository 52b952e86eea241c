"""Differences between arms over seeds, tested with what all arms and settings of a sweep show about their spread.

A setting is a learning rate, say. In each, seeds are taken out where they matter: the difference is then one over
pairs, with the residual of the additive model arm + seed. Whether they matter is asked by the F test of the seeds in
that model, at 5%, which sees no difference between arms. Where they do not, the means are compared as those of
independent samples (Welch), which have up to twice the degrees of freedom. Two arms alone are always pairs: only their
difference could say whether seeds matter.

Three seeds hardly know their own spread. So the variance of a difference is the mean square of all arms of its setting
times a ratio: how much the compared arms vary beside all of them. The ratio is the setting's own, averaged with those
of the other settings, which together weigh as two degrees of freedom. The degrees of freedom of the product follow
Satterthwaite. In a single setting this is Student's paired or Welch's test. `benchmarks/levels.py` measures level
and power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import fdtrc

from stability_lab.compare.statistics import Difference, Method, extremes, finite, tested

# Seeds are taken out where the F test of them has a p of at most this.
SEEDS_MATTER = 0.05
# Degrees of freedom as which the other settings count in the ratio of spreads.
ELSEWHERE = 2.0

Values = Mapping[Any, float]  # by seed


@dataclass(frozen=True)
class Contrast:
    """One setting: the sum of `weights` times the means of `arms`; `beside` are its other arms, which show spread."""

    arms: tuple[Values, ...]
    beside: tuple[Values, ...] = ()
    weights: tuple[float, ...] = (1.0, -1.0)


@dataclass(frozen=True)
class _Spread:
    """Mean squares of a setting: `squares` of the compared arms, which by their `factors` make the variance of the
    `estimate`, and `rest` of all others, with their degrees of freedom. Arrays have the shape (parts,).

    `rest_effective` are those of the rest by Satterthwaite. `n` is the smallest number of seeds.
    """

    estimate: float
    n: int
    factors: np.ndarray
    squares: np.ndarray
    free: np.ndarray
    rest: float = 0.0
    rest_free: float = 0.0
    rest_effective: float = 0.0

    @property
    def all_free(self) -> float:
        return float(self.free.sum()) + self.rest_free

    @property
    def pooled(self) -> float:
        return (float(self.free @ self.squares) + self.rest_free * self.rest) / self.all_free


def difference_by_seed(own: Values, other: Values, paired: bool, beside: Sequence[Values] = ()) -> Difference | None:
    """own - other in a single setting, see `differences`."""
    return differences([Contrast((own, other), tuple(beside))], paired)[0]


@extremes
def differences(contrasts: Sequence[Contrast], paired: bool) -> list[Difference | None]:
    """The same contrast in several settings; None where one of its arms has no value.

    `paired`: runs of one seed are pairs, and the seeds count that all compared arms have. Where those are too few, or
    the runs are no pairs, Welch's test compares all values. Raises `ValueError` for a value that is not finite.
    """
    tables = [_table(one.arms, one.arms) if paired else np.empty((len(one.arms), 0)) for one in contrasts]
    without_seeds = [_without_seeds(contrast, table) for contrast, table in zip(contrasts, tables, strict=True)]
    as_they_are = [_as_they_are(contrast) for contrast in contrasts]
    found: list[Difference | None] = []
    for at, (contrast, table) in enumerate(zip(contrasts, tables, strict=True)):
        if without_seeds[at] is not None and _seeds_matter(contrast, table):
            found.append(_difference(without_seeds, at, "paired"))
        elif as_they_are[at] is not None:
            found.append(_difference(as_they_are, at, "welch"))
        elif all(contrast.arms):
            method, sides = ("paired", table) if table.size else ("welch", map(_values, contrast.arms))
            value = math.fsum(w * side.mean() for w, side in zip(contrast.weights, sides, strict=True))
            found.append(Difference(value, None, None, None, 1, method))
        else:
            found.append(None)
    return found


def _values(arm: Values) -> np.ndarray:
    return finite(list(arm.values()))


def _table(arms: Sequence[Values], among: Sequence[Values]) -> np.ndarray:
    """Values of the seeds that all of `among` have, for those of `arms` that have them too. (arms, seeds)"""
    seeds = [seed for seed in among[0] if all(seed in arm for arm in among)]
    whole = [[arm[seed] for seed in seeds] for arm in arms if all(seed in arm for seed in seeds)]
    return np.array(whole, dtype=float).reshape(len(whole), len(seeds))


def _seeds_matter(contrast: Contrast, table: np.ndarray) -> bool:
    """Of the compared arms and those beside them that have the same seeds."""
    if not (np.array(contrast.weights) @ table).any():  # identical
        return True
    whole = np.vstack([table, _table(contrast.beside, contrast.arms)])
    arms, n = whole.shape
    residual, free = _residual(whole)
    if arms == 2 or residual == 0:
        return True
    seeds = arms * float(whole.mean(0).var(ddof=1))
    return float(fdtrc(n - 1, free, seeds / (residual / free))) <= SEEDS_MATTER


def _residual(table: np.ndarray) -> tuple[float, int]:
    """Sum of squares and degrees of freedom that the additive model arm + seed leaves."""
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    arms, n = table.shape
    return float((left**2).sum()), (arms - 1) * (n - 1)


def _without_seeds(contrast: Contrast, table: np.ndarray) -> _Spread | None:
    n = table.shape[1]
    if n < 2:
        return None
    weights = np.array(contrast.weights)
    pairs, size = weights @ table, float(weights @ weights)
    own = float(pairs.var(ddof=1)) / size
    total, free = _residual(np.vstack([table, _table(contrast.beside, contrast.arms)]))
    rest_free = free - (n - 1)
    rest = max(0.0, total - (n - 1) * own) / rest_free if rest_free else 0.0
    return _Spread(
        float(pairs.mean()), n, np.array([size / n]), np.array([own]), np.array([n - 1.0]), rest, rest_free, rest_free
    )


def _as_they_are(contrast: Contrast) -> _Spread | None:
    if any(len(arm) < 2 for arm in contrast.arms):
        return None
    arms, weights = [_values(arm) for arm in contrast.arms], np.array(contrast.weights)
    beside = [_values(arm) for arm in contrast.beside if len(arm) > 1]
    squares, free = np.array([arm.var(ddof=1) for arm in beside]), np.array([len(arm) - 1.0 for arm in beside])
    rest_free = float(free.sum())
    quarters = float((free * squares**2).sum())
    return _Spread(
        float(weights @ [arm.mean() for arm in arms]),
        min(map(len, arms)),
        weights**2 / [len(arm) for arm in arms],
        np.array([arm.var(ddof=1) for arm in arms]),
        np.array([len(arm) - 1.0 for arm in arms]),
        float(free @ squares) / rest_free if rest_free else 0.0,
        rest_free,
        float(free @ squares) ** 2 / quarters if quarters else rest_free,
    )


def _difference(spreads: Sequence[_Spread | None], at: int, method: Method) -> Difference:
    one = spreads[at]
    assert one is not None
    error, df = _error(one, [other for other in spreads if other is not None and other is not one and other.pooled > 0])
    return Difference(one.estimate, *tested(one.estimate, error, df), one.n, method, error * math.sqrt(one.n), df)


def _error(one: _Spread, elsewhere: Sequence[_Spread]) -> tuple[float, float]:
    """Standard error and its degrees of freedom.

    The logarithm of the variance has the slope `h` in that of a compared arm's square through its ratio, and `w` in
    any square through the pooled one, which is also in the ratio's denominator.
    """
    pooled, smallest = one.pooled, float(one.free.min())
    if pooled == 0:
        return 0.0, smallest
    own, ratio, others = 1.0, one.squares / pooled, len(elsewhere)
    if elsewhere:
        own = smallest / (smallest + min(ELSEWHERE, sum(float(other.free.min()) for other in elsewhere)))
        ratio = own * ratio + (1 - own) * np.mean([other.squares / other.pooled for other in elsewhere], axis=0)
    variance = pooled * float(one.factors @ ratio)
    if variance == 0:
        return 0.0, smallest
    h = pooled * one.factors * ratio / variance
    w = one.free * ratio / one.all_free
    rest = max(0.0, 1 - float(w.sum()))
    inverse = float((((own * (h - w) + w) ** 2 + (1 - own) ** 2 / max(others, 1) * (h - w) ** 2) / one.free).sum())
    if one.rest_effective:
        inverse += ((1 - own) ** 2 + (1 - own) ** 2 / max(others, 1)) * rest**2 / one.rest_effective
    return math.sqrt(variance), 1 / inverse
