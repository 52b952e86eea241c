"""Largest attention logit over steps, of each arm and of each of its layers: where growth begins, and what stops it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stability_lab.compare.comparison import Comparison
from stability_lab.compare.figures.chosen import chosen
from stability_lab.compare.figures.curves import steps
from stability_lab.compare.figures.looks import looks
from stability_lab.compare.figures.style import (
    WIDTH,
    brief,
    entry,
    legend,
    logarithmic,
    near,
    new_figure,
    padded,
    rule,
    view,
)
from stability_lab.compare.run_record import RunRecord
from stability_lab.judge.events import LOGIT_ALERT, LOGIT_CRITICAL

LOGIT = "attn/max_logit"
MOST_COLUMNS = 4
Series = Mapping[str, np.ndarray]


def attention_logits(comparison: Comparison) -> Figure | None:
    """Draw a panel of all arms, and one of layers for each arm that logs them; None without a positive logit."""
    picked = chosen(comparison)
    if picked is None:
        return None
    series = {arm: own for arm, run in picked.runs.items() if (own := _read(run))}
    span = view((v for own in series.values() for name, vs in own.items() if name != "step" for v in vs), log=True)
    if span is None:
        return None
    negative = any(np.any(vs <= 0) for own in series.values() for name, vs in own.items() if name != "step")
    limits = padded(min(span[0], LOGIT_ALERT), max(span[1], LOGIT_CRITICAL), log=True)
    layered = [arm for arm, own in series.items() if _layers(own)]
    rows, columns = _grid(1 + len(layered))
    figure = new_figure(WIDTH if columns > 1 else WIDTH * 0.6, 0.5 + 1.9 * rows if columns > 1 else 2.6)
    figure.suptitle(picked.title)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[1 + len(layered) :]:
        axes.remove()
    panels = list(grid[: 1 + len(layered)])
    for number, axes in enumerate(panels):
        logarithmic(axes, *limits)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
        for height, name in ((LOGIT_ALERT, "alert"), (LOGIT_CRITICAL, "critical")):
            rule(axes, height, name if number == 0 else "")
        if number % columns == 0:
            axes.set_ylabel("largest attention logit" + (" (> 0)" if negative else ""))
        if number + columns >= len(panels):
            axes.set_xlabel("optimizer step")
            axes.tick_params(labelbottom=True)
    _all_arms(panels[0], series, comparison.grouping.arms, limits)
    if layered:
        panels[0].set_title("largest of all layers")
        _by_layer(figure, panels[1:], [series[arm] for arm in layered], limits)
    look = looks(comparison.grouping.arms)
    for axes, arm in zip(panels[1:], layered, strict=True):
        axes.set_title(brief(arm, 80 // columns), color=look[arm].colour)
    legend(figure, [entry(picked.names[arm], **{**look[arm].point(), **look[arm].line()}) for arm in series])
    return figure


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns with the fewest empty places."""
    if panels <= MOST_COLUMNS:
        return 1, panels
    columns = min((MOST_COLUMNS, MOST_COLUMNS - 1), key=lambda n: -panels % n)
    return math.ceil(panels / columns), columns


def _read(run: RunRecord) -> Series:
    """Steps and logits of the rows that hold any, in which `LOGIT` is the largest of the layers where it was not logged
    itself; empty where there are none."""
    names = [name for name in run.columns() if name == LOGIT or name.startswith(f"{LOGIT}/L")]
    read = run.series("step", *names)
    values = {name: read[name] for name in sorted(names)}
    if not values:
        return {}
    values.setdefault(LOGIT, np.fmax.reduce(list(values.values())))
    kept = np.any([np.isfinite(value) for value in values.values()], axis=0)
    return {"step": steps(read["step"])[kept], **{name: value[kept] for name, value in values.items()}}


def _layers(own: Series) -> list[str]:
    return [name for name in own if name.startswith(f"{LOGIT}/")]


def _all_arms(axes: Axes, series: Mapping[str, Series], arms: Sequence[str], limits: tuple[float, float]) -> None:
    for arm, look in looks(arms).items():
        if arm in series:
            own = series[arm]
            every = max(1, math.ceil(len(own["step"]) / 6))
            drawn = {**look.point(), **look.line(), "markersize": 3.5, "markevery": every}
            axes.plot(own["step"], near(own[LOGIT], limits, log=True), label=arm, **drawn)


def _by_layer(figure: Figure, panels: Sequence[Axes], series: Sequence[Series], limits: tuple[float, float]) -> None:
    layers = sorted({name for own in series for name in _layers(own)})
    colours = _colours(len(layers))
    for axes, own in zip(panels, series, strict=True):
        for number, layer in enumerate(layers):
            if layer in own:
                few: Any = {"marker": "o", "markersize": 2} if len(own["step"]) < 3 else {}
                drawn = near(own[layer], limits, log=True)
                axes.plot(own["step"], drawn, color=colours(number), linewidth=0.9, label=layer, **few)
    edges = np.arange(len(layers) + 1) - 0.5
    bar = figure.colorbar(
        ScalarMappable(BoundaryNorm(edges, len(layers)), colours), ax=panels, aspect=30, label="layer"
    )
    bar.ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    bar.ax.minorticks_off()
    bar.ax.grid(False)
    bar.outline.set_visible(False)


def _colours(n: int) -> Colormap:
    """Return colours from viridis without its palest part, which cannot be seen on white paper."""
    return ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.9, n)))
