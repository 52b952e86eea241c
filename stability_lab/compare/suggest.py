"""Commands for the next runs: learning rates that would show most, and seeds that would separate arms."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from stability_lab.compare.comparison import Comparison
from stability_lab.compare.grouping import LR, STABILIZER
from stability_lab.compare.ladders import Ladder, next_learning_rates
from stability_lab.compare.run_record import RunRecord
from stability_lab.config import in_suggestion

# What takes more gets no command.
MOST_NEW_SEEDS = 10
# Two more seeds than one give a first test; so many are offered where nothing says how many it takes.
FIRST_SEEDS, GUESSED_SEEDS = 2, 5


def suggest(comparison: Comparison, paths: Sequence[str] = ()) -> list[str]:
    """Lines to read, and commands to run: one for each set of arms that share all other overrides.

    `paths` are those that were compared, for the command that looks at new seeds alone.
    """
    runs = [run for cell in comparison.grouping.cells for run in cell.runs]
    if not all(isinstance(run.manifest.get("overrides"), list) for run in runs):
        return ["No command: some of these runs were not made by `train`, so their overrides are not known."]
    seeds = sorted({run.seed for run in runs if isinstance(run.seed, int)})
    lrs = sorted({lr for run in runs if (lr := run.lr) is not None})
    lines: list[str] = []
    new_lrs = sorted({lr for ladder in comparison.ladders for lr in next_learning_rates(ladder)})
    if missing := _missing(comparison.ladders):
        lines.append("Learning rates that an arm lacks (runs that are there are skipped):")
        lines += _commands(runs, missing, seeds)
    if new_lrs:
        lines.append("Learning rates, the same for every arm, so that their sensitivities stay comparable:")
        lines += _commands(runs, new_lrs, seeds)
    return lines + _seeds(comparison, runs, lrs, seeds, paths) or [
        "Nothing: every difference is resolved, and no better learning rate is in sight."
    ]


def _missing(ladders: Sequence[Ladder]) -> list[float]:
    """Learning rates of some arms that others of the same setting have no result at."""
    found: set[float] = set()
    for ladder in ladders:
        grids = [set(other.lrs) for other in ladders if other.setting == ladder.setting]
        found |= set.union(*grids) - set(ladder.lrs)
    return sorted(found)


def _seeds(
    comparison: Comparison, runs: Sequence[RunRecord], lrs: Sequence[float], seeds: Sequence[int], paths: Sequence[str]
) -> list[str]:
    """New seeds for differences that were tested and not resolved are to be compared alone: a test that is repeated
    with more seeds until it finds something finds something by chance."""
    compared = [row.difference for row in comparison.rows if row.difference and not row.difference.identical]
    first = max(seeds, default=-1) + 1
    if any(difference.significant is None for difference in compared):
        new = range(first, first + FIRST_SEEDS)
        return ["Seeds, for intervals and tests, which one seed cannot give:", *_commands(runs, lrs, new)]
    if not any(difference.significant is False for difference in compared):
        return []
    ranges = [ends for difference in compared if (ends := difference.seeds_range) is not None]
    count, takes = GUESSED_SEEDS, "How many a difference takes cannot be told from these"
    if ranges:
        few, many = min(ranges)
        count = max(few, min(many, MOST_NEW_SEEDS))
        takes = f"The clearest open difference takes {few} to {many}, were its size the true one (80% power)"
        if few > MOST_NEW_SEEDS:
            return [f"No new seeds: {takes[0].lower()}{takes[1:]}."]
    new = range(first, first + count)
    alone = ["python", "-m", "stability_lab", "compare", *paths, "--seeds", f"{new[0]}-{new[-1]}"]
    return [
        "New seeds, to be compared alone and once: a test that is repeated while seeds are added finds what is not "
        f"there. {takes}:",
        *_commands(runs, lrs, new),
        f"  {shlex.join(alone)}",
    ]


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
    if chosen.get("trainer.threads") == "trainer.threads=1":
        del chosen["trainer.threads"]  # a sweep's own
    return tuple(sorted(chosen.values()))


def _place(runs: Sequence[RunRecord]) -> list[str]:
    groups = {str(run.manifest.get("group")) for run in runs}
    places = {str(run.config.get("output_dir", "outputs")) for run in runs}
    words = [f"output_dir={next(iter(places))}"] if len(places) == 1 and places != {"outputs"} else []
    return words + ([f"group={next(iter(groups))}"] if len(groups) == 1 else [])
