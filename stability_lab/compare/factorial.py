"""Main effects and interactions of stabilizers that a sweep combined in full: none, a, b and a+b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stability_lab.compare.contrasts import Contrast, differences
from stability_lab.compare.grouping import STABILIZER, Cell, Grouping
from stability_lab.compare.statistics import Difference

MOST_FACTORS = 4
# Softcap's probe: share of attention logits beyond cap/2, where tanh begins to bend.
TOUCHED = "attn/score_mod/share/touched"


@dataclass(frozen=True)
class Effect:
    """A main effect is the mean loss with the factor minus that without it.

    An interaction `a x b` is half of how much the effect of a changes with b.
    """

    name: str
    difference: Difference


@dataclass(frozen=True, eq=False)
class Factorial:
    factors: tuple[str, ...]
    setting: Mapping[str, Any]
    effects: tuple[Effect, ...]
    touched: Mapping[str, float]  # arm -> largest share of its logits that the cap touches
    reason: str | None = None  # what is missing from the effects


def factorials(grouping: Grouping, metric: str, paired: bool) -> list[Factorial]:
    """The largest full factorials among the arms, in each setting; empty where arms are no stabilizers alone."""
    if grouping.by != (STABILIZER,):
        return []
    settings: dict[tuple[str, ...], list[tuple[Mapping[str, Any], dict[str, Cell]]]] = {}
    for setting, cells in grouping.settings():
        for factors in _largest(cells):
            settings.setdefault(factors, []).append((setting, cells))
    return [one for factors, where in settings.items() for one in _factorials(factors, where, metric, paired)]


def _factorials(
    factors: tuple[str, ...],
    settings: Sequence[tuple[Mapping[str, Any], Mapping[str, Cell]]],
    metric: str,
    paired: bool,
) -> list[Factorial]:
    """Each effect is a contrast of all combinations, in each setting: half of them with the factor minus the others."""
    arms = _combinations(factors)
    terms = [term for n in range(1, len(factors) + 1) for term in combinations(factors, n)]
    by_term = []
    for term in terms:
        weights = tuple((-1.0) ** sum(factor not in arm for factor in term) * 2 / len(arms) for arm in arms)
        contrasts = []
        for _, cells in settings:
            values = {arm: cell.values(metric) for arm, cell in cells.items()}
            compared = tuple(values.pop(_label(arm)) for arm in arms)
            contrasts.append(Contrast(compared, tuple(values.values()), weights))
        by_term.append(differences(contrasts, paired))
    found = []
    for at, (setting, cells) in enumerate(settings):
        own = [cells[_label(arm)] for arm in arms]
        effects = tuple(Effect(" x ".join(t), d) for t, of in zip(terms, by_term, strict=True) if (d := of[at]))
        shares = {cell.arm: [share for run in cell.ended if (share := run.metric(TOUCHED)) is not None] for cell in own}
        touched = {arm: max(some) for arm, some in shares.items() if some}
        diverged = sum(len(cell.diverged) for cell in own)
        reason = f"{diverged} diverged runs are left out" if diverged else None
        if not effects:
            reason = "too few runs to tell the effects apart" + (f": {diverged} runs diverged" if diverged else "")
        found.append(Factorial(factors, setting, effects, touched, reason))
    return found


def _largest(cells: Mapping[str, Cell]) -> list[tuple[str, ...]]:
    """Sets of two or more stabilizers of which the sweep has every combination; subsets of another set are left out."""
    names = sorted({part for arm in cells for part in arm.split("+") if part != "none"})
    if "none" not in cells or len(names) < 2:
        return []
    full: list[tuple[str, ...]] = []
    for size in range(min(MOST_FACTORS, len(names)), 1, -1):
        for factors in combinations(names, size):
            covered = any(set(factors) <= set(larger) for larger in full)
            if not covered and all(_label(arm) in cells for arm in _combinations(factors)):
                full.append(factors)
    return full


def _combinations(factors: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for n in range(len(factors) + 1) for chosen in combinations(factors, n)]


def _label(chosen: Sequence[str]) -> str:
    return "+".join(sorted(chosen)) or "none"
