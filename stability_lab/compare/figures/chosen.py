"""Which runs the figures over steps show: one of each arm, of one setting and one seed, with a result and a log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stability_lab.compare.comparison import Comparison, Row
from stability_lab.compare.figures.style import label
from stability_lab.compare.grouping import LR, Cell, seed_of, setting_text
from stability_lab.compare.run_record import RunRecord
from stability_lab.text import number


@dataclass(frozen=True, eq=False)
class Chosen:
    """`names` holds each arm's text in a figure, with its seed where that is not the title's."""

    title: str
    runs: Mapping[str, RunRecord]  # by arm, the baseline first
    names: Mapping[str, str]


def chosen(comparison: Comparison) -> Chosen | None:
    """Choose one setting and one seed; None where no run has a log.

    The setting is the one in which most arms have a run; among equals that in which arms differ most, then that of the
    higher learning rate. The seed is the one that most arms have; an arm without it shows its first.
    """
    settings = [
        (setting, {arm: runs for arm, cell in cells.items() if (runs := _logged(cell))})
        for setting, cells in comparison.grouping.settings()
    ]

    def rank(found: tuple[Mapping[str, Any], dict[str, list[RunRecord]]]) -> tuple[int, float, float]:
        setting, runs = found
        rows = [row for row in comparison.rows if row.cell.setting == setting and row.cell.arm in runs]
        return len(runs), _spread(rows), _height(setting)

    setting, runs = max(settings, key=rank, default=({}, {}))
    if not runs:
        return None
    seeds = Counter(str(seed_of(run)) for own in runs.values() for run in own)
    seed = max(seeds, key=lambda value: seeds[value])
    picked = {arm: next((run for run in own if str(seed_of(run)) == seed), own[0]) for arm, own in runs.items()}
    common = next(run for run in picked.values() if str(seed_of(run)) == seed)
    words = [setting_text(setting), _seed_text(common)]
    names = {
        arm: label(arm if str(seed_of(run)) == seed else f"{arm} ({_seed_text(run)})") for arm, run in picked.items()
    }
    return Chosen(label(", ".join(word for word in words if word), 100), picked, names)


def _logged(cell: Cell) -> list[RunRecord]:
    return [run for run in cell.ended if (run.path / "metrics.jsonl").is_file()]


def _spread(rows: Sequence[Row]) -> float:
    """How far the means of arms lie apart; infinite where one has none and another has."""
    means = [row.metric.value for row in rows if row.metric]
    return 0.0 if not means else math.inf if len(means) < len(rows) else max(means) - min(means)


def _height(setting: Mapping[str, Any]) -> float:
    lr = number(setting.get(LR))
    return lr if lr is not None and lr == lr else 0.0


def _seed_text(run: RunRecord) -> str:
    init, data = seed_of(run)
    return f"seed {init}" if init == data else f"init seed {init}, data seed {data}"
