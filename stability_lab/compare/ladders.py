"""What the learning rates of a sweep show about each arm, and which to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stability_lab.compare.contrasts import difference_by_seed
from stability_lab.compare.grouping import LR, Cell, Grouping, seed_of
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import Difference, Mean, family, t_interval
from stability_lab.judge.lr_sensitivity import (
    MARGIN_NATS,
    Bracket,
    UsableRange,
    largest_stable_lr,
    lr_sensitivity,
    ratio_interval,
    usable_range,
)


@dataclass(frozen=True, eq=False)
class Ladder:
    """One arm over the learning rates of its setting, which holds all keys that vary but the learning rate.

    `losses` are means over seeds, NaN where a seed diverged, None without a run: a learning rate at which one of the
    seeds diverges is neither the best nor usable. The sensitivity takes measured losses, of a run that ended in a
    non-finite one the loss at initialisation; `sensitivity_l0` puts that for every run that diverged.
    """

    arm: str
    setting: Mapping[str, Any]
    lrs: tuple[float, ...]
    losses: tuple[float | None, ...]
    seeds: int
    sensitivity: Mean | None
    sensitivity_l0: Mean | None
    reason: str | None  # why there is no sensitivity
    difference: Difference | None  # of the sensitivities, to the baseline's; all of a sweep are one family
    best_lr: float | None
    at_end: bool
    at_chance: bool
    usable: UsableRange | None
    stable: Bracket | None
    ratio: tuple[float, float] | None  # of the largest stable learning rate to the baseline's


def ladders(grouping: Grouping, metric: str, paired: bool) -> list[Ladder]:
    """One ladder for each arm and setting with two learning rates or more.

    Empty where the learning rate does not vary, or where the metric is not a loss: lower must be better, and its value
    at initialisation must mean something.
    """
    if LR not in grouping.setting or not metric.endswith(("/loss", "/bits_per_byte")):
        return []
    found: dict[tuple[Any, ...], dict[str, list[Cell]]] = {}
    for cell in grouping.cells:
        if not isinstance(cell.setting[LR], (int, float)):  # a log that does not name its learning rate
            continue
        rest = tuple((key, value) for key, value in cell.setting.items() if key != LR)
        found.setdefault(rest, {}).setdefault(cell.arm, []).append(cell)
    result = []
    for rest, arms in found.items():
        grid = sorted({float(cell.setting[LR]) for cells in arms.values() for cell in cells})
        if len(grid) < 2:
            continue
        made = {arm: _Rungs(arm, grid, cells, metric) for arm, cells in arms.items()}
        base = made.get(grouping.baseline)
        result += [_ladder(rungs, base, dict(rest), paired) for rungs in made.values()]
    differences = family([ladder.difference for ladder in result])
    return [replace(ladder, difference=difference) for ladder, difference in zip(result, differences, strict=True)]


class _Rungs:
    """The runs of one arm by learning rate and seed."""

    def __init__(self, arm: str, grid: Sequence[float], cells: Sequence[Cell], metric: str):
        self.arm, self.grid = arm, tuple(grid)
        self.cells = {float(cell.setting[LR]): cell for cell in cells}
        runs: dict[str, dict[float, RunRecord]] = {}
        for lr, cell in self.cells.items():
            for run in cell.ended:
                runs.setdefault(str(seed_of(run)), {})[lr] = run
        self.by_seed = runs
        self.metric = metric

    def l0(self, seed: str) -> float | None:
        values = [run.initial(self.metric) for run in self.by_seed[seed].values()]
        return next((v for v in values if v is not None and math.isfinite(v)), None)

    def loss(self, seed: str, lr: float) -> float | None:
        """The run's loss: NaN if it ended without a finite one, None if there is no run."""
        run = self.by_seed[seed].get(lr)
        if run is None:
            return None
        value = run.metric(self.metric)
        return math.nan if value is None and run.diverged else value

    def sensitivities(self) -> tuple[dict[str, tuple[float, float]], str | None]:
        """(measured, with l0) of each seed that has one, and a reason where none has."""
        found, reason = {}, "no run has ended"
        for seed, runs in self.by_seed.items():
            l0 = self.l0(seed)
            if l0 is None:
                reason = f"no run says its {self.metric} at initialisation"
                continue
            diverged = [lr in runs and runs[lr].diverged for lr in self.grid]
            result = lr_sensitivity([self.loss(seed, lr) for lr in self.grid], l0, diverged=diverged)
            if result.value is None or result.value_l0 is None:
                reason = result.reason or "not defined"
            else:
                found[seed] = (result.value, result.value_l0)
        return found, None if found else reason

    def means(self) -> tuple[float | None, ...]:
        """Mean loss over seeds for each learning rate; NaN as soon as one of them diverged or is not finite."""
        means: list[float | None] = []
        for lr in self.grid:
            known = [loss for seed in self.by_seed if (loss := self.loss(seed, lr)) is not None]
            bad = any(runs[lr].diverged for runs in self.by_seed.values() if lr in runs)
            means.append(math.nan if bad else math.fsum(known) / len(known) if known else None)
        return tuple(means)

    def stable(self, losses: Sequence[float | None]) -> Bracket | None:
        """The bracket of the largest stable learning rate; None where no run ended, so that no limit is known."""
        known = [lr for lr in self.grid if lr in self.cells and self.cells[lr].ended]
        if not known:
            return None
        finite = [(loss, lr) for lr, loss in zip(self.grid, losses, strict=True) if loss is not None and loss == loss]
        best = min(finite)[1] if finite else math.inf
        stable = [[_stable(run, lr <= best) for run in self.cells[lr].ended] for lr in known]
        return largest_stable_lr(known, stable)


def _stable(run: RunRecord, low: bool) -> bool:
    """Whether a run is stable; below the best learning rate one that has not learned is undertrained, not unstable."""
    return not run.diverged and (run.verdict in ("stable", "spiky") or (low and run.verdict == "no_learning"))


def _ladder(rungs: _Rungs, base: _Rungs | None, setting: Mapping[str, Any], paired: bool) -> Ladder:
    losses = rungs.means()
    own, reason = rungs.sensitivities()
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    usable = usable_range(rungs.grid, losses)
    best = usable.best if usable else None
    stable = rungs.stable(losses)
    l0s = [l0 for seed in rungs.by_seed if (l0 := rungs.l0(seed)) is not None]
    ratio = difference = None
    if base is not None and base is not rungs:
        other = base.stable(base.means())
        ratio = ratio_interval(stable, other) if stable and other else None
        measured, of_base = (
            {seed: value for seed, (value, _) in one.items()} for one in (own, base.sensitivities()[0])
        )
        difference = difference_by_seed(measured, of_base, paired)
    return Ladder(
        arm=rungs.arm,
        setting=setting,
        lrs=rungs.grid,
        losses=losses,
        seeds=len(rungs.by_seed),
        sensitivity=t_interval([value for value, _ in own.values()]) if own else None,
        sensitivity_l0=t_interval([value for _, value in own.values()]) if own else None,
        reason=reason,
        difference=difference,
        best_lr=best,
        at_end=best is not None and best in (rungs.grid[0], rungs.grid[-1]),
        at_chance=bool(l0s) and min(finite, default=math.inf) >= min(l0s) - MARGIN_NATS,
        usable=usable,
        stable=stable,
        ratio=ratio,
    )


def next_learning_rates(ladder: Ladder) -> list[float]:
    """Up to three learning rates that would show most, each to two digits.

    They lie beyond an end at which the best lies, on either side of the best, and inside the bracket of the largest
    stable one.
    """
    wanted: list[float] = []
    lrs = ladder.lrs
    step = min((lrs[-1] / lrs[0]) ** (1 / (len(lrs) - 1)), math.sqrt(10))
    if ladder.best_lr is not None:
        at = lrs.index(ladder.best_lr)
        wanted.append(lrs[0] / step if at == 0 else math.sqrt(lrs[at - 1] * lrs[at]))
        wanted.append(lrs[-1] * step if at == len(lrs) - 1 else math.sqrt(lrs[at] * lrs[at + 1]))
    bracket = ladder.stable
    if bracket is not None:
        if bracket.low is not None and bracket.high is not None:
            wanted.append(math.sqrt(bracket.low * bracket.high))
        elif bracket.low is None and bracket.high is not None:
            wanted.append(bracket.high / step)
    rounded = {float(f"{lr:.2g}") for lr in wanted}
    return sorted(lr for lr in rounded if not any(math.isclose(lr, known, rel_tol=0.02) for known in lrs))
