"""How time and memory of a training step grow with layers, width, sequence and vocabulary: `benchmarks.step --growth`.

One size grows at a time, the others stay: 4 layers, width 128 (heads are 32 wide), 128 tokens, vocabulary 512, batch 4.
Each round builds every model anew. An exponent is the slope of a line through logarithms of the two or three largest
sizes; that of the FLOPs stands beside, for what the convention counts. Memory is what the step adds to the process: its
weights, gradients, moments and activations at their peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Group, clock
from stability_lab.diagnostics.memory import peak_bytes, reset_peak

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASE = {"layers": 4, "width": 128, "sequence": 128, "vocabulary": 512}
BATCH, HEAD_DIM, LARGEST = 4, 32, 3
AXES = {
    "layers": (1, 2, 4, 8, 16, 32),
    "width": (64, 128, 256, 512, 768),
    "sequence": (64, 128, 256, 512, 1024, 2048),
    "vocabulary": (256, 1024, 4096, 16384, 65536),
}
QUICK = {axis: values[:3] for axis, values in AXES.items()}
Step = Callable[[Sequence[str]], Callable[[Tensor], object]]


def measured(args: argparse.Namespace, our_step: Step) -> Iterator[Group]:
    axes = QUICK if args.quick else AXES
    points = [(axis, value) for axis, values in axes.items() for value in values]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {point: [] for point in points}
    for number in range(2 if args.quick else 3):
        for point in points if number % 2 else reversed(points):
            found[point].append(_once({**BASE, point[0]: point[1]}, our_step, clock(args)))
    rows = []
    for axis, value in points:
        seconds = [s for s, _ in found[axis, value]]
        row = {"name": f"{axis} {value}", "axis": axis, "value": value, "seconds": float(np.median(seconds))}
        rows.append(row | {"least s": min(seconds), "most s": max(seconds)})
        rows[-1]["MiB"] = float(np.median([m for _, m in found[axis, value]])) / 2**20
    yield Group("A step while one size grows", rows)
    exponents = []
    for axis, values in axes.items():
        part = [row for row in rows if row["axis"] == axis]
        every = [[found[axis, value][r][0] for value in values] for r in range(len(found[axis, values[0]]))]
        slopes = [slope(values, seconds) for seconds in every]
        exponents.append(
            {
                "name": axis,
                "time exponent": slope(values, [row["seconds"] for row in part]),
                "least": min(slopes),
                "most": max(slopes),
                "FLOPs": slope(values, [_flops({**BASE, axis: value}) for value in values]),
                "memory": slope(values, [row["MiB"] for row in part]),
            }
        )
    yield Group(f"Exponents of the {LARGEST} largest sizes", exponents)
    if args.picture:
        draw(args.picture, axes, rows)


def slope(values: Sequence[int], costs: Sequence[float]) -> float:
    """Least squares through (log value, log cost) of the largest values."""
    x, y = np.log(values[-LARGEST:]), np.log(costs[-LARGEST:])
    return float(np.polyfit(x, y, 1)[0])


def _once(sizes: dict[str, int], our_step: Step, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and bytes that it adds to the process."""
    cpu = torch.device("cpu")
    tokens = torch.randint(sizes["vocabulary"], (BATCH, sizes["sequence"] + 1))
    overrides = [
        *(f"model.n_layers={sizes['layers']}", f"model.d_model={sizes['width']}"),
        *(f"model.n_heads={sizes['width'] // HEAD_DIM}", f"model.seq_len={sizes['sequence']}"),
        f"model.vocab_size={sizes['vocabulary']}",
    ]
    reset_peak(cpu)
    before = peak_bytes(cpu) or 0
    step = our_step(overrides)
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.3 and len(seconds) < 20):
        started = clock()
        step(tokens)
        seconds.append(clock() - started)
    return float(np.median(seconds[1:])), max((peak_bytes(cpu) or 0) - before, 1)


def _flops(sizes: dict[str, int]) -> int:
    d, layers = sizes["width"], sizes["layers"]
    weights = 12 * layers * d * d + d * sizes["vocabulary"]
    return BATCH * sizes["sequence"] * (6 * weights + 12 * layers * d * sizes["sequence"])


def draw(path: Path, axes: dict[str, tuple[int, ...]], rows: list[dict]) -> None:
    from stability_lab.compare.figures import style  # matplotlib takes a second

    with style.applied():
        figure = style.new_figure(9, 3.6)
        _plot(figure.subplots(1, 2), axes, rows)
        style.save(figure, path)


def _plot(panels: Sequence[Axes], axes: dict[str, tuple[int, ...]], rows: list[dict]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for panel, key, label in zip(panels, ("seconds", "MiB"), ("seconds a step", "MiB that a step adds"), strict=True):
        for axis, marker in zip(axes, "osD^", strict=True):
            part = [row for row in rows if row["axis"] == axis]
            panel.plot([row["value"] / BASE[axis] for row in part], [row[key] for row in part], marker=marker)
        panel.set(xscale="log", yscale="log", xlabel="size, of the base model's", ylabel=label)
        for of, locator in ((panel.xaxis, LogLocator(4)), (panel.yaxis, LogLocator(10, (1, 2, 5)))):
            of.set_major_locator(locator)
            of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            of.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0].legend([f"{axis} ({BASE[axis]})" for axis in axes])
