"""Commands for the next runs: learning rates that would show most, and seeds that would separate arms."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from stability_lab.compare.comparison import Comparison
from stability_lab.compare.grouping import LR, STABILIZER
from stability_lab.compare.ladders import next_learning_rates
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import MOST_SEEDS
from stability_lab.config import in_suggestion

MOST_NEW_SEEDS = 5


def suggest(comparison: Comparison) -> list[str]:
    """Lines to read, and commands to run: one for each set of arms that share all other overrides."""
    runs = [run for cell in comparison.grouping.cells for run in cell.runs]
    if not all(isinstance(run.manifest.get("overrides"), list) for run in runs):
        return ["No command: some of these runs were not made by `train`, so their overrides are not known."]
    seeds = sorted({run.seed for run in runs if isinstance(run.seed, int)})
    lrs = sorted({lr for run in runs if (lr := run.lr) is not None})
    lines: list[str] = []
    new_lrs = sorted({lr for ladder in comparison.ladders for lr in next_learning_rates(ladder)})
    if new_lrs:
        lines.append("Learning rates, the same for every arm, so that their sensitivities stay comparable:")
        lines += _commands(runs, new_lrs, seeds)
    more = _new_seeds(comparison, seeds)
    if more:
        lines.append(f"Seeds, for {_reason(comparison)}:")
        lines += _commands(runs, lrs, more)
    return lines or ["Nothing: every difference is resolved, and no better learning rate is in sight."]


def _new_seeds(comparison: Comparison, seeds: Sequence[int]) -> list[int]:
    wanted = 0
    for row in comparison.rows:
        difference = row.difference
        if difference is None or difference.identical:
            continue
        if difference.significant is None:
            wanted = max(wanted, 2)
        elif not difference.significant:
            wanted = max(wanted, (difference.seeds_needed or MOST_SEEDS) - difference.n)
    first = max(seeds, default=-1) + 1
    return list(range(first, first + min(wanted, MOST_NEW_SEEDS)))


def _reason(comparison: Comparison) -> str:
    if any(row.difference and row.difference.p is None for row in comparison.rows):
        return "intervals and tests, which one seed cannot give"
    open_ones = [row.difference for row in comparison.rows if row.difference and row.difference.significant is False]
    needed = max((difference.seeds_needed or MOST_SEEDS for difference in open_ones), default=MOST_SEEDS)
    words = f"{needed:,} seeds" if needed < MOST_SEEDS else f"more than {MOST_SEEDS:,} seeds"
    return f"differences that are not resolved (the hardest would need {words}; {MOST_NEW_SEEDS} at a time)"


def _commands(runs: Sequence[RunRecord], lrs: Sequence[float], seeds: Sequence[int]) -> list[str]:
    """One multirun for each set of further overrides; stabilizers last, so that compared runs follow each other."""
    arms: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for run in runs:
        arms[_further(run)][_stabilizers(run)] = None
    lines = []
    for further, stabilizers in arms.items():
        words = ["python", "-m", "stability_lab", "train", "-m"]
        words += [f"seed={','.join(map(str, seeds))}"] if seeds else []
        words += [f"optimizer.lr={','.join(f'{lr:g}' for lr in lrs)}"] if lrs else []
        words += [f"+stabilizer={','.join(stabilizers)}", *further, *_place(runs)]
        lines.append("  " + shlex.join(words))
    return lines


def _stabilizers(run: RunRecord) -> str:
    """Stabilizers as the user named them: those of a recipe come with it and would be reached twice."""
    asked = "none"
    for override in map(str, run.manifest["overrides"]):
        key, _, value = override.lstrip("+").partition("=")
        if key == "stabilizer":
            asked = value
    names = asked.strip("[]").split(",")
    return asked if len(names) > 1 else names[0] or "none"


def _further(run: RunRecord) -> tuple[str, ...]:
    """The other overrides that the user gave; the last value of a key that was given twice, as Hydra does."""
    chosen: dict[str, str] = {}
    for override in map(str, run.manifest["overrides"]):
        key, equals, value = override.lstrip("+").partition("=")
        if key not in (STABILIZER, LR) and in_suggestion(key):
            chosen.pop(key, None)
            chosen[key] = f"{key}{equals}{value}"
    return tuple(sorted(chosen.values()))


def _place(runs: Sequence[RunRecord]) -> list[str]:
    groups = {str(run.manifest.get("group")) for run in runs}
    places = {str(run.config.get("output_dir", "outputs")) for run in runs}
    words = [f"output_dir={next(iter(places))}"] if len(places) == 1 and places != {"outputs"} else []
    return words + ([f"group={next(iter(groups))}"] if len(groups) == 1 else [])
