"""Figures of runs; the only file that imports matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers repeat the distinction.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def against_learning_rate(table: pd.DataFrame, path: Path) -> None:
    """Final validation loss and largest attention logit of the runs in `tables.comparison`, over learning rate."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = {"val/loss": "validation loss (nats per byte)", "largest attention logit": "largest attention logit"}
        for axes, (column, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for number, (name, runs) in enumerate(table.groupby("stabilizer", sort=False)):
                mean = pd.Series(runs.groupby("lr")[column].mean())
                axes.plot(
                    mean.index,
                    mean.to_numpy(),
                    label=str(name),
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    linewidth=1.4,
                    markersize=5,
                )
            axes.set_xscale("log")
            if column != "val/loss" and bool((table[column] > 0).any()):
                axes.set_yscale("log")
            axes.set_xlabel("peak learning rate")
            axes.set_ylabel(label)
            axes.grid(alpha=0.25, linewidth=0.5)
        figure.axes[0].legend(frameon=False)
        figure.savefig(path, dpi=150)


FORMATS = ("png", "svg", "pdf")


def draw(comparison, folder, formats):
    return []
