"""What the learning rates of a sweep show about each arm, and which to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stability_lab.compare.contrasts import Contrast, difference_by_seed, differences
from stability_lab.compare.grouping import LR, Cell, Grouping, seed_of
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import Difference, Mean, t_interval
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
    """One arm over the learning rates at which it has a result, in one setting of all other keys that vary.

    `losses` are means over seeds, NaN where a seed diverged: a learning rate at which one of the seeds diverges is
    neither the best nor usable. The sensitivity takes measured losses, of a run that ended in a non-finite one the loss
    at initialisation; `sensitivity_l0` puts that for every run that diverged. `common` are the rates that the baseline
    has too: `difference`, of the sensitivities, and `gain`, of the losses at `tuned`, the best rate of each among them,
    compare the two arms there. `compare` takes the gain from the table of losses where both are the same rate.
    """

    arm: str
    setting: Mapping[str, Any]
    lrs: tuple[float, ...]
    losses: tuple[float | None, ...]
    seeds: int
    sensitivity: Mean | None
    sensitivity_l0: Mean | None
    reason: str | None  # why there is no sensitivity
    best_lr: float | None
    at_end: bool
    at_chance: bool
    usable: UsableRange | None
    stable: Bracket | None
    ratio: tuple[float, float] | None  # of the largest stable learning rate to the baseline's
    common: tuple[float, ...] = ()
    difference: Difference | None = None
    tuned: tuple[float, float] | None = None  # of the arm and of the baseline
    gain: Difference | None = None


def ladders(grouping: Grouping, metric: str, paired: bool) -> list[Ladder]:
    """One ladder for each arm in each setting with two learning rates or more.

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
    settings = []
    for rest, arms in found.items():
        made = {arm: _Rungs(arm, cells, metric) for arm, cells in arms.items()}
        if len({lr for rungs in made.values() for lr in rungs.grid}) > 1:
            settings.append((dict(rest), made))
    tests = _tests_of_sensitivity(grouping, [made for _, made in settings], paired)
    return [
        _ladder(rungs, made.get(grouping.baseline), setting, tests.get(id(rungs)), paired)
        for setting, made in settings
        for rungs in made.values()
    ]


def _tests_of_sensitivity(
    grouping: Grouping, settings: Sequence[Mapping[str, _Rungs]], paired: bool
) -> dict[int, Difference | None]:
    """By the id of the arm's rungs: its sensitivity minus the baseline's, over the rates that both have."""
    tests: dict[int, Difference | None] = {}
    for arm in grouping.arms:
        both = [made for made in settings if arm in made and grouping.baseline in made and arm != grouping.baseline]
        contrasts = []
        for made in both:
            common = made[arm].common(made[grouping.baseline])
            values = {name: rungs.measured(common) for name, rungs in made.items()}
            own, base = values.pop(arm), values.pop(grouping.baseline)
            contrasts.append(Contrast((own, base), tuple(values.values())))
        found = differences(contrasts, paired)
        tests |= {id(made[arm]): test for made, test in zip(both, found, strict=True)}
    return tests


class _Rungs:
    """The runs of one arm by learning rate and seed; `grid` are the rates at which one has ended."""

    def __init__(self, arm: str, cells: Sequence[Cell], metric: str):
        self.arm, self.metric = arm, metric
        self.cells = {float(cell.setting[LR]): cell for cell in cells if cell.ended}
        self.grid = tuple(sorted(self.cells))
        self.by_seed: dict[str, dict[float, RunRecord]] = {}
        self._sensitivities: dict[tuple[float, ...], tuple[dict[str, tuple[float, float]], str | None]] = {}
        for lr, cell in self.cells.items():
            for run in cell.ended:
                self.by_seed.setdefault(str(seed_of(run)), {})[lr] = run

    def common(self, other: _Rungs) -> tuple[float, ...]:
        return tuple(lr for lr in self.grid if lr in other.cells)

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

    def sensitivities(self, grid: tuple[float, ...]) -> tuple[dict[str, tuple[float, float]], str | None]:
        """(measured, with l0) of each seed that has one over `grid`, and a reason where none has."""
        if grid not in self._sensitivities:
            self._sensitivities[grid] = self._of(grid)
        return self._sensitivities[grid]

    def _of(self, grid: tuple[float, ...]) -> tuple[dict[str, tuple[float, float]], str | None]:
        found, reason = {}, "no run has ended"
        for seed, runs in self.by_seed.items():
            l0 = self.l0(seed)
            if l0 is None:
                reason = f"no run says its {self.metric} at initialisation"
                continue
            diverged = [lr in runs and runs[lr].diverged for lr in grid]
            result = lr_sensitivity([self.loss(seed, lr) for lr in grid], l0, diverged=diverged)
            if result.value is None or result.value_l0 is None:
                reason = result.reason or "not defined"
            else:
                found[seed] = (result.value, result.value_l0)
        return found, None if found else reason

    def measured(self, grid: tuple[float, ...]) -> dict[str, float]:
        return {seed: value for seed, (value, _) in self.sensitivities(grid)[0].items()}

    def means(self) -> tuple[float | None, ...]:
        """Mean loss over seeds for each learning rate; NaN as soon as one of them diverged or is not finite."""
        means: list[float | None] = []
        for lr in self.grid:
            known = [loss for seed in self.by_seed if (loss := self.loss(seed, lr)) is not None]
            means.append(math.nan if self.cells[lr].diverged else math.fsum(known) / len(known) if known else None)
        return tuple(means)

    def best(self, among: Sequence[float]) -> float | None:
        """The rate with the lowest mean loss."""
        means = dict(zip(self.grid, self.means(), strict=True))
        finite = [(loss, lr) for lr in among if (loss := means[lr]) is not None and math.isfinite(loss)]
        return min(finite)[1] if finite else None

    def stable(self, among: Sequence[float]) -> Bracket | None:
        """The bracket of the largest stable learning rate; None where no run says anything about it.

        An undecided run is no evidence, and a rate that has no other is left out.
        """
        decided = {lr: [run for run in self.cells[lr].ended if run.outcome != "undecided"] for lr in among}
        known = [lr for lr in among if decided[lr]]
        if not known:
            return None
        best = self.best([lr for lr in known if any(_learned(run) for run in decided[lr])]) or -math.inf
        return largest_stable_lr(known, [[_stable(run, lr < best) for run in decided[lr]] for lr in known])


def _learned(run: RunRecord) -> bool:
    return run.outcome in ("stable", "spiky")


def _stable(run: RunRecord, low: bool) -> bool:
    """Whether a run is stable; below the best rate one that did not learn is undertrained, not unstable."""
    return _learned(run) or (low and run.outcome == "no_learning")


def _ladder(
    rungs: _Rungs, base: _Rungs | None, setting: Mapping[str, Any], difference: Difference | None, paired: bool
) -> Ladder:
    losses = rungs.means()
    own, reason = rungs.sensitivities(rungs.grid)
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    usable = usable_range(rungs.grid, losses)
    best = usable.best if usable else None
    stable = rungs.stable(rungs.grid)
    l0s = [l0 for seed in rungs.by_seed if (l0 := rungs.l0(seed)) is not None]
    ladder = Ladder(
        arm=rungs.arm,
        setting=setting,
        lrs=rungs.grid,
        losses=losses,
        seeds=len(rungs.by_seed),
        sensitivity=t_interval([value for value, _ in own.values()]) if own else None,
        sensitivity_l0=t_interval([value for _, value in own.values()]) if own else None,
        reason=reason,
        best_lr=best,
        at_end=best is not None and best in (rungs.grid[0], rungs.grid[-1]),
        at_chance=bool(l0s) and min(finite, default=math.inf) >= min(l0s) - MARGIN_NATS,
        usable=usable,
        stable=stable,
        ratio=None,
    )
    if base is None or base is rungs:
        return ladder
    common = rungs.common(base)
    both = rungs.stable(common), base.stable(common)
    best_own, best_base = rungs.best(common), base.best(common)
    tuned = gain = None
    if best_own is not None and best_base is not None:
        tuned = (best_own, best_base)
        values = (rungs.cells[best_own].values(rungs.metric), base.cells[best_base].values(rungs.metric))
        gain = difference_by_seed(*values, paired)
    ratio = ratio_interval(both[0], both[1]) if both[0] and both[1] else None
    return replace(ladder, ratio=ratio, common=common, difference=difference, tuned=tuned, gain=gain)


def next_learning_rates(ladder: Ladder) -> list[float]:
    """Up to three learning rates that would show most, each to two digits.

    They lie beyond an end at which the best lies, on either side of the best, and inside the bracket of the largest
    stable one.
    """
    wanted: list[float] = []
    lrs = ladder.lrs
    if len(lrs) < 2:
        return []
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
