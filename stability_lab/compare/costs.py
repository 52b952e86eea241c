"""What an arm costs beside the baseline: tokens/s over pairs of runs, and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from stability_lab.compare.grouping import Cell, seed_of
from stability_lab.compare.run_record import RunRecord
from stability_lab.text import number

# One pair of runs says what the machine did just then.
FEWEST_PAIRS = 2


def warming_up(cells: Sequence[Cell]) -> frozenset[int]:
    """The ids of runs that were the first job of their process, which pays for warm-up and compilation.

    Older manifests do not say; the first that was created of a command is then taken for it.
    """
    first, oldest = set(), {}
    for run in (run for cell in cells for run in cell.runs):
        earlier = number(run.manifest.get("earlier_jobs"))
        if earlier == 0:
            first.add(id(run))
        elif earlier is None:
            command = str(run.manifest.get("argv"))
            oldest[command] = min(oldest.get(command, run), run, key=_created)
    return frozenset(first | {id(run) for run in oldest.values()})


def _created(run: RunRecord) -> Any:
    return str(run.manifest.get("created", "")), str(run.path)


def speed_ratio(cell: Cell, base: Cell | None, first: frozenset[int]) -> float | None:
    """Median over seeds of tokens/s over that of the baseline's run of the same seed; None below two pairs.

    Of a pair both or neither must be among the `first` jobs.
    """
    if base is None:
        return None
    own, other = ({str(seed_of(run)): run for run in some.ended if run.metric("tokens_per_s")} for some in (cell, base))
    pairs = [(own[s], other[s]) for s in own if s in other and (id(own[s]) in first) == (id(other[s]) in first)]
    ratios = [(a.metric("tokens_per_s") or 0.0) / (b.metric("tokens_per_s") or math.nan) for a, b in pairs]
    return median(ratios) if len(ratios) >= FEWEST_PAIRS else None


def memory_bytes(cell: Cell) -> float | None:
    """Peak of torch's allocator on a GPU. On a CPU the bytes of weights, gradients and optimizer state, which are
    counted: the resident memory of a process holds what its earlier jobs left."""
    values = [value for run in cell.ended if (value := _memory(run)) is not None]
    return median(values) if values else None


def counted(cells: Sequence[Cell]) -> bool:
    return any(run.manifest.get("device") == "cpu" for cell in cells for run in cell.ended)


def _memory(run: RunRecord) -> float | None:
    if run.manifest.get("device") == "cpu":
        return number(run.manifest.get("training_bytes"))
    return run.metric("perf/peak_memory_bytes")


def spread_of_speed(cell: Cell, first: frozenset[int]) -> float:
    """Largest over smallest tokens/s of runs that compute the same, without those that were warming up."""
    speeds = [
        v for run in cell.ended if id(run) not in first and (v := run.metric("tokens_per_s")) is not None and v > 0
    ]
    return max(speeds) / min(speeds) if speeds else 1.0
