"""What a learning-rate ladder says: LR sensitivity, usable range, and the largest stable learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

# A best loss less than this below the loss at initialisation is chance.
MARGIN_NATS = 0.05
# How far above the best loss a learning rate is still usable, and from where on it is lost.
USABLE_NATS, EDGE_NATS = 0.02, 0.1
# Published losses have three decimals, and the difference of two such is exact to about this.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class LrSensitivity:
    """Result of `lr_sensitivity`.

    `value` and `value_l0` are None with a `reason` where undefined. `lowest` is the lowest finite loss and `argmin`
    its position; `at_edge` says that the best learning rate may lie outside the grid, `at_chance` that no run learned,
    which makes a sensitivity near 0 worthless.
    """

    value: float | None
    value_l0: float | None
    lowest: float | None
    argmin: int | None
    at_edge: bool
    at_chance: bool
    l0: float
    divisor: Literal["n", "n-1"]
    n: int
    n_nonfinite: int
    reason: str | None = None


@dataclass(frozen=True)
class UsableRange:
    """Learning rates with a loss near the best: `usable` within 0.02 nats, `near` within 0.1. `edge` is None where the
    grid ends before it."""

    best: float
    usable: tuple[float, ...]
    near: tuple[float, ...]
    edge: float | None


@dataclass(frozen=True)
class Bracket:
    """The largest stable learning rate lies in [low, high).

    `censored` is `low` where no learning rate was stable (`low` is None) and `high` where all were (`high` is None).
    `fraction` is the stable part of the seeds for each learning rate of the grid. Not `monotone`: those in
    `stable_above` are stable although a lower one is not.
    """

    low: float | None
    high: float | None
    censored: Literal["low", "high"] | None
    monotone: bool
    fraction: tuple[float, ...]
    stable_above: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.low is None:
            return f"< {self.high:g}"
        return f">= {self.low:g}" if self.high is None else f"[{self.low:g}, {self.high:g})"


def lr_sensitivity(
    losses: Sequence[float | None],
    l0: float,
    divisor: Literal["n", "n-1"] = "n",
    diverged: Sequence[bool] | None = None,
) -> LrSensitivity:
    """Mean of min(loss, l0) - lowest loss over a grid of learning rates (Wortsman et al., 2309.14322, 2.2).

    `losses` are final validation losses in ascending order of learning rate; NaN and infinities become `l0`, the
    measured loss at initialisation; None is a missing run, which leaves the result undefined. `value` keeps the
    measured loss of a run that diverged while finite; `value_l0` puts l0 for every run in `diverged`. The divisor
    `n-1` is that of some published tables. Raises `ValueError` for an l0 that is not finite.
    """
    if not math.isfinite(l0):
        raise ValueError(f"l0 is {l0}, but must be the finite loss at initialisation")
    if divisor not in ("n", "n-1"):
        raise ValueError(f"divisor is {divisor!r}, but must be 'n' or 'n-1'")
    if diverged is not None and len(diverged) != len(losses):
        raise ValueError(f"{len(losses)} losses, but {len(diverged)} entries of diverged")
    known = [loss for loss in losses if loss is not None]
    finite = {i: loss for i, loss in enumerate(losses) if loss is not None and math.isfinite(loss)}
    argmin = min(finite, key=finite.__getitem__, default=None)
    lowest = None if argmin is None else finite[argmin]
    reason = None
    if len(known) < len(losses):
        reason = f"{len(losses) - len(known)} of {len(losses)} learning rates have no result"
    elif len(losses) < 2:
        reason = f"a grid of {len(losses)} learning rates has no sensitivity"
    elif lowest is None:
        reason = f"none of the {len(losses)} losses is finite"
    value = value_l0 = None
    if reason is None:
        measured = [loss if math.isfinite(loss) else l0 for loss in known]
        replaced = [l0 if bad else loss for bad, loss in zip(diverged or [False] * len(known), measured, strict=True)]
        value, value_l0 = (_mean_excess(series, l0, divisor) for series in (measured, replaced))
    return LrSensitivity(
        value=value,
        value_l0=value_l0,
        lowest=lowest,
        argmin=argmin,
        at_edge=argmin is not None and argmin in (0, len(losses) - 1),
        at_chance=lowest is not None and lowest >= l0 - MARGIN_NATS,
        l0=l0,
        divisor=divisor,
        n=len(losses),
        n_nonfinite=len(known) - len(finite),
        reason=reason,
    )


def usable_range(lrs: Sequence[float], losses: Sequence[float | None]) -> UsableRange | None:
    """Learning rates within 0.02 and 0.1 nats of the best loss, and the lowest above the best that is over 0.1 worse.

    A loss that is not finite is worse than any; None is a missing run and says nothing. None without a finite loss.
    Raises `ValueError` unless `lrs` ascend.
    """
    _check_grid(lrs, losses, "losses")
    points = [(lr, loss) for lr, loss in zip(lrs, losses, strict=True) if loss is not None]
    finite = [(loss, lr) for lr, loss in points if math.isfinite(loss)]
    if not finite:
        return None
    lowest, best = min(finite)
    usable, near = (
        tuple(lr for loss, lr in finite if loss <= lowest + nats + _ROUNDING) for nats in (USABLE_NATS, EDGE_NATS)
    )
    beyond = [lr for lr, _ in points if lr > best and lr not in near]
    return UsableRange(best, usable, near, edge=min(beyond, default=None))


def largest_stable_lr(lrs: Sequence[float], stable_by_seed: Sequence[Sequence[bool]]) -> Bracket:
    """Bracket the largest learning rate up to which every seed is stable.

    `stable_by_seed` has one sequence for each of `lrs`, with one entry a seed. Raises `ValueError` unless `lrs` ascend
    and each has a seed.
    """
    _check_grid(lrs, stable_by_seed, "entries of stable_by_seed")
    if not lrs or not all(len(seeds) for seeds in stable_by_seed):
        raise ValueError("every learning rate needs at least one seed")
    stable = [all(seeds) for seeds in stable_by_seed]
    n = stable.index(False) if False in stable else len(stable)
    above = tuple(lr for lr, good in zip(lrs[n:], stable[n:], strict=True) if good)
    return Bracket(
        low=lrs[n - 1] if n else None,
        high=lrs[n] if n < len(lrs) else None,
        censored="low" if n == 0 else "high" if n == len(lrs) else None,
        monotone=not above,
        fraction=tuple(sum(map(bool, seeds)) / len(seeds) for seeds in stable_by_seed),
        stable_above=above,
    )


def ratio_interval(a: Bracket, b: Bracket) -> tuple[float, float]:
    """Where the ratio of the largest stable learning rates of `a` and `b` lies: (low, high), 0 and inf if unknown."""
    low = 0.0 if a.low is None or b.high is None else a.low / b.high
    high = math.inf if a.high is None or b.low is None else a.high / b.low
    return low, high


def refine(bracket: Bracket) -> float:
    """The learning rate to try next: the geometric mean. Raises `ValueError` for a censored bracket."""
    if bracket.low is None or bracket.high is None:
        end = "lower" if bracket.low is None else "higher"
        raise ValueError(f"the largest stable learning rate is {bracket}: extend the grid to {end} ones")
    return math.sqrt(bracket.low * bracket.high)


def _mean_excess(losses: Sequence[float], l0: float, divisor: str) -> float:
    clipped = [min(loss, l0) for loss in losses]
    return math.fsum(loss - min(clipped) for loss in clipped) / (len(clipped) - (divisor == "n-1"))


def _check_grid(lrs: Sequence[float], values: Sequence[object], name: str) -> None:
    if len(lrs) != len(values):
        raise ValueError(f"{len(lrs)} learning rates, but {len(values)} {name}")
    if any(not low < high for low, high in pairwise(lrs)):
        raise ValueError(f"the learning rates must ascend: {list(lrs)}")
