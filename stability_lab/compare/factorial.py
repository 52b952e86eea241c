"""Main effects and interactions of stabilizers that a sweep combined in full: none, a, b and a+b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from stability_lab.compare.grouping import STABILIZER, Cell, Grouping, seed_of
from stability_lab.compare.statistics import LEVEL

MOST_FACTORS = 4
# Softcap's probe: share of attention logits beyond cap/2, where tanh begins to bend.
TOUCHED = "attn/score_mod/share/touched"


@dataclass(frozen=True)
class Effect:
    """A main effect is the mean loss with the factor minus that without it.

    An interaction `a x b` is half of how much the effect of a changes with b. `low`, `high` and `p` are None where no
    degree of freedom is left over.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True, eq=False)
class Factorial:
    factors: tuple[str, ...]
    setting: Mapping[str, Any]
    effects: tuple[Effect, ...]
    seeds: int
    df: int
    touched: Mapping[str, float]  # arm -> largest share of its logits that the cap touches
    reason: str | None = None  # why there are no effects


def factorials(grouping: Grouping, metric: str) -> list[Factorial]:
    """The largest full factorials among the arms, in each setting; empty where arms are no stabilizers alone."""
    if grouping.by != (STABILIZER,):
        return []
    made = []
    for setting, cells in grouping.settings():
        for factors in _largest(cells):
            arms = {frozenset(arm): cells[_label(arm)] for arm in _combinations(factors)}
            made.append(_factorial(factors, setting, arms, metric))
    return made


def effects(rows: Sequence[tuple[frozenset[str], Any, float]], factors: Sequence[str]) -> tuple[list[Effect], int]:
    """Least squares of loss on factors coded -1/2 and +1/2, their products, and a level for each seed.

    `rows` are (factors that are on, seed, loss). Returns the effects and the residual degrees of freedom. Raises
    `ValueError` where the design does not determine them.
    """
    seeds = sorted({str(seed) for _, seed, _ in rows})
    terms = [term for n in range(1, len(factors) + 1) for term in combinations(factors, n)]
    # With -1/2 and +1/2 a product of k factors would have height 2**-k: scaled so that each column has height 1/2.
    columns = [[0.5 * np.prod([1.0 if f in on else -1.0 for f in term]) for on, _, _ in rows] for term in terms]
    blocks = [[float(str(seed) == name) for _, seed, _ in rows] for name in seeds]
    design = np.array([*columns, *blocks], dtype=float).T
    loss = np.array([value for _, _, value in rows])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError("too few runs to tell the effects apart")
    inverse = np.linalg.inv(design.T @ design)
    beta = inverse @ design.T @ loss
    df = len(rows) - design.shape[1]
    found = []
    for i, term in enumerate(terms):
        low = high = p = None
        if df > 0:
            residual = loss - design @ beta
            error = float(np.sqrt(residual @ residual / df * inverse[i, i]))
            half = float(stats.t.ppf((1 + LEVEL) / 2, df)) * error
            low, high = float(beta[i]) - half, float(beta[i]) + half
            p = float(2 * stats.t.sf(abs(float(beta[i])) / error, df)) if error > 0 else None
        found.append(Effect(" x ".join(term), float(beta[i]), low, high, p))
    return found, df


def _factorial(
    factors: tuple[str, ...], setting: Mapping[str, Any], arms: Mapping[frozenset[str], Cell], metric: str
) -> Factorial:
    rows, touched = [], {}
    for on, cell in arms.items():
        for run in cell.finite:
            value = run.metric(metric)
            if value is not None and np.isfinite(value):
                rows.append((on, seed_of(run), value))
        shares = [share for run in cell.ended if (share := run.metric(TOUCHED)) is not None]
        if shares:
            touched[cell.arm] = max(shares)
    diverged = sum(len(cell.diverged) for cell in arms.values())
    seeds = len({str(seed) for _, seed, _ in rows})
    try:
        found, df = effects(rows, factors)
        reason = f"{diverged} diverged runs are left out" if diverged else None
    except ValueError as error:
        found, df, reason = [], 0, f"{error}" + (f": {diverged} runs diverged" if diverged else "")
    return Factorial(factors, setting, tuple(found), seeds, df, touched, reason)


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
