"""Training loss and gradient norm over steps, side by side: the norm grows and spikes before the loss says anything
(as in Fig. 1 of OLMo 2, arXiv:2501.00656)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from stability_lab.compare.comparison import Comparison
from stability_lab.compare.figures.chosen import chosen
from stability_lab.compare.figures.looks import Look, looks
from stability_lab.compare.figures.style import (
    WIDTH,
    entry,
    legend,
    logarithmic,
    near,
    new_figure,
    padded,
    view,
)
from stability_lab.compare.run_record import RunRecord
from stability_lab.judge.spikes import rolling_median
from stability_lab.text import number

# Column, text of its axis, name of its spikes, logarithmic?
PANELS = (
    ("train/loss", "training loss (nats per token)", "loss_spike", False),
    ("optim/grad_norm", "gradient L2 norm before clipping", "grad_norm_spike", True),
)
SPIKE: dict[str, Any] = {"marker": "v", "linestyle": "none", "markersize": 3.5, "markeredgewidth": 0}
END: dict[str, Any] = {"marker": "x", "linestyle": "none", "markersize": 5.5, "markeredgewidth": 1.3}


def curves(comparison: Comparison) -> Figure | None:
    """One run of each arm; None where no log has a finite loss or gradient norm."""
    picked = chosen(comparison)
    if picked is None:
        return None
    series = {arm: run.series("step", *(panel[0] for panel in PANELS)) for arm, run in picked.runs.items()}
    panels = [p for p in PANELS if view((v for own in series.values() for v in own[p[0]]), log=p[3]) is not None]
    if not panels:
        return None
    look = looks(comparison.grouping.arms)
    figure = new_figure(WIDTH if len(panels) > 1 else WIDTH * 0.6, 2.6)
    figure.suptitle(picked.title)
    spiky = ended = False
    for axes, (column, text, event, log) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        low, high = view((v for own in series.values() for v in own[column]), log) or (1.0, 1.0)
        limits = padded(low, high, log, top=0.04)
        if log:
            logarithmic(axes, *limits)
        else:
            axes.set_ylim(*limits)
        axes.set(xlabel="optimizer step", ylabel=text)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
        for number_of_arm, (arm, own) in enumerate(series.items()):
            step = steps(own["step"])
            _curve(axes, step, near(own[column], limits, log), look[arm], number_of_arm / len(series))
            spiky |= _spikes(axes, picked.runs[arm], event, step, own[column], look[arm])
            ended |= _end(axes, picked.runs[arm], step, own[column], look[arm])
    entries = [entry(picked.names[arm], **{**look[arm].point(), **look[arm].line()}) for arm in series]
    if spiky:
        entries.append(entry("spike", color="0.35", **SPIKE))
    if ended:
        entries.append(entry("ended early", color="0.35", **END))
    legend(figure, entries)
    return figure


def steps(logged: np.ndarray) -> np.ndarray:
    """Steps as logged; rows are counted where the log does not say them."""
    return logged if np.isfinite(logged).all() else np.arange(1.0, len(logged) + 1)


def _curve(axes: Axes, step: np.ndarray, values: np.ndarray, look: Look, shift: float) -> None:
    """Draw all values as a pale line, which shows spikes, below their running median, which shows the arm.

    Markers are shifted so that those of two arms do not meet.
    """
    axes.plot(step, values, color=look.colour, linewidth=0.6, alpha=0.5, label="all values")
    known = np.isfinite(values)
    level = running_median(values[known])
    axes.plot(step[known], level, label="median", zorder=2.2, **look.line())
    marked = slice(int(shift * len(level) / 6), None, max(1, math.ceil(len(level) / 6)))
    axes.plot(step[known][marked], level[marked], label="markers", zorder=2.4, **{**look.point(), "markersize": 3.5})


def running_median(values: np.ndarray) -> np.ndarray:
    """Median over a thirtieth of the run, centred.

    The window shrinks towards both ends. The end values stay as they are; so do all values of a run of less than 60.
    """
    half = len(values) // 60
    level = values.copy()
    if half:
        level[half:-half] = rolling_median(values, 1 + 2 * half)
    for at in range(half):
        level[at] = np.median(values[: 2 * at + 1])
        level[-1 - at] = np.median(values[len(values) - 2 * at - 1 :])
    return level


def _spikes(axes: Axes, run: RunRecord, event: str, step: np.ndarray, values: np.ndarray, look: Look) -> bool:
    """Draw a triangle above the highest value of each event, at the top edge where that is out of view."""
    at = []
    for first, length in run.events(event):
        inside = np.flatnonzero((step >= first) & (step < first + length))
        if len(inside):
            heights = np.where(np.isnan(values[inside]), np.inf, values[inside])
            at.append(inside[np.argmax(heights)])
    if not at:
        return False
    heights = _within(values[at], axes.get_ylim())
    lifted = axes.transData + ScaledTranslation(0, 4 / 72, axes.figure.dpi_scale_trans)
    axes.plot(step[at], heights, color=look.colour, transform=lifted, clip_on=False, label=event, **SPIKE)
    return True


def _end(axes: Axes, run: RunRecord, step: np.ndarray, values: np.ndarray, look: Look) -> bool:
    """Draw a cross at the last finite value of a run that ended early."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known) or not _early(run, float(step[-1])):
        return False
    last = known[-1:]
    axes.plot(
        step[last], _within(values[last], axes.get_ylim()), color=look.colour, clip_on=False, label="ended early", **END
    )
    return True


def _early(run: RunRecord, last: float) -> bool:
    trainer = run.config.get("trainer")
    planned = number(trainer.get("max_steps")) if isinstance(trainer, Mapping) else None
    return run.diverged if planned is None else last < planned


def _within(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    return np.clip(np.where(np.isnan(values), limits[1], values), *limits)
