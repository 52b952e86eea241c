"""Loss and largest attention logit over the learning rate, the picture by which a sweep is read (arXiv:2309.14322)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

from stability_lab.compare.comparison import DEGRADED_LOGIT, DEGRADED_NATS, Comparison, Row
from stability_lab.compare.figures.looks import Look, looks
from stability_lab.compare.figures.style import (
    WIDTH,
    entry,
    label,
    learning_rates,
    legend,
    logarithmic,
    new_figure,
    padded,
    quantity,
    rule,
    view,
)
from stability_lab.compare.grouping import LR, setting_text
from stability_lab.judge.events import LOGIT_CRITICAL
from stability_lab.text import rough

MOST_SETTINGS = 6
DIVERGED: dict[str, Any] = {"color": "0.2", "marker": "x", "linestyle": "none", "markersize": 5, "markeredgewidth": 1.2}
SEED: dict[str, Any] = {"marker": ".", "linestyle": "none", "markersize": 3}
_DODGE = 1.04  # between the seeds of two arms: a learning rate's factor
_LANE, _MOST_LANES = 0.06, 0.35  # shares of the panel: of one arm's diverged runs, of all arms'


def loss_over_lr(comparison: Comparison) -> Figure | None:
    """A row of panels for each setting of the other keys; None where no setting has two learning rates."""
    panels = _panels(comparison)
    if not panels:
        return None
    logits = any(_logit(row) is not None for rows in panels for row in rows)
    shown = panels[:MOST_SETTINGS]
    figure = new_figure(WIDTH if logits else WIDTH * 0.6, 2.6 * len(shown))
    grid = figure.subplots(len(shown), 1 + logits, squeeze=False)
    arms = _arms(comparison)
    for axes, rows in zip(grid, shown, strict=True):
        _losses(axes[0], rows, arms, comparison)
        if logits:
            _logits(axes[1], rows, arms)
        rest = {key: value for key, value in rows[0].cell.setting.items() if key != LR}
        if rest:
            axes[0].set_title(label(setting_text(rest), 50), loc="left")
    if len(panels) > len(shown):
        figure.suptitle(f"{len(shown)} of {len(panels)} settings")
    drawn = [row for rows in shown for row in rows]
    named = [arm for arm in arms if any(row.cell.arm == arm for row in drawn)]  # not "all runs", which says nothing
    legend(figure, [entry(label(arm), **{**arms[arm].point(), **arms[arm].line()}) for arm in named] + _marks(drawn))
    return figure


def _panels(comparison: Comparison) -> list[list[Row]]:
    """Rows that have something to show, grouped by setting without the learning rate and sorted by learning rate."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in comparison.rows:
        lr = _lr(row, comparison)
        if lr is not None and (row.metric or row.cell.diverged):
            rest = tuple(value for key, value in row.cell.setting.items() if key != LR)
            found.setdefault(rest, []).append(row)
    panels = [sorted(rows, key=lambda row: _known_lr(row)) for rows in found.values()]
    return [rows for rows in panels if len({_known_lr(row) for row in rows}) > 1]


def _lr(row: Row, comparison: Comparison) -> float | None:
    """None where the learning rate is no axis: it does not vary, or it belongs to the arms beside something else."""
    if LR not in row.cell.setting and comparison.grouping.by != (LR,):
        return None
    lr = row.cell.runs[0].lr
    return lr if lr is not None and math.isfinite(lr) and lr > 0 else None


def _known_lr(row: Row) -> float:
    return row.cell.runs[0].lr or math.nan


def _arms(comparison: Comparison) -> dict[str, Look]:
    grouping = comparison.grouping
    if grouping.by == (LR,):  # the arms are the axis
        return looks(["all runs"])
    return looks(grouping.arms)


def _arm(row: Row, arms: dict[str, Look]) -> str:
    return row.cell.arm if row.cell.arm in arms else next(iter(arms))


def _losses(axes: Axes, rows: Sequence[Row], arms: dict[str, Look], comparison: Comparison) -> None:
    metric = comparison.metric
    points = [(row, _values(row, metric)) for row in rows]
    means = [row.metric.value for row in rows if row.metric]
    span = view([*means, *(value for _, values in points for value in values)])
    lanes = [arm for arm in arms if any(row.cell.diverged for row in rows if _arm(row, arms) == arm)]
    zone = min(_LANE * (len(lanes) + 0.5), _MOST_LANES) if lanes else 0.0
    learning_rates(axes, map(_known_lr, rows))
    axes.set_ylabel(quantity(metric))
    if span is None:
        zone = 1.0
        _loss_axis(axes, 0.0, 1.0, zone)
    else:
        low, high = span
        _loss_axis(axes, low, high, zone)
        for number, (arm, look) in enumerate(arms.items()):
            own = [(row, values) for row, values in points if _arm(row, arms) == arm]
            _loss_line(axes, own, arm, look, high, _DODGE ** (number - (len(arms) - 1) / 2))
        _initial(axes, rows, metric, low, high)
    _diverged(axes, rows, arms, lanes, zone)


def _loss_axis(axes: Axes, low: float, high: float, zone: float) -> None:
    """Label the loss axis: numbers below the zone of diverged runs, and the word "diverged" in that zone."""
    bottom, top = padded(low, high, top=zone) if zone < 1 else (low, high)
    axes.set_ylim(bottom, top)
    limit = top - zone * (top - bottom)
    word = (limit + top) / 2
    rounded = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(bottom, limit)
    ticks = [tick for tick in rounded if bottom <= tick <= limit]
    if zone == 1:
        ticks = []
    texts = _numbers(axes, ticks)
    axes.set_yticks([*ticks, word] if zone else ticks, [*texts, "diverged"] if zone else texts)


def _numbers(axes: Axes, ticks: Sequence[float]) -> list[str]:
    formatter = EngFormatter(sep="") if max(map(abs, ticks), default=0) >= 1e5 else ScalarFormatter(useOffset=False)
    formatter.set_axis(axes.yaxis)
    return formatter.format_ticks(list(ticks))


def _loss_line(
    axes: Axes, own: Sequence[tuple[Row, list[float]]], arm: str, look: Look, high: float, dodge: float
) -> None:
    """Join means by a line, interrupted where no seed survived; draw a value above `high` at that height.

    Seeds are drawn at `dodge` times their learning rate, beside those of other arms.
    """
    x = np.array([_known_lr(row) for row, _ in own])
    y = np.array([row.metric.value if row.metric else math.nan for row, _ in own])
    axes.plot(x, np.minimum(y, high), label=arm, **look.line())
    for (row, values), lr, mean in zip(own, x, y, strict=True):
        if len(values) > 1:
            seeds = [value for value in values if value <= high]
            axes.plot([lr * dodge] * len(seeds), seeds, label="seeds", color=look.colour, alpha=0.6, **SEED)
        point = look.point(filled=not row.degraded)
        if mean > high:
            axes.plot(lr, high, label="mean", clip_on=False, **point)
            last = lr == x[-1]
            axes.annotate(
                f"{rough(mean)} ↑" if last else f"↑ {rough(mean)}",
                (lr, high),
                xytext=(-5 if last else 5, -3),
                textcoords="offset points",
                ha="right" if last else "left",
                fontsize=6.5,
                color=look.colour,
            )
        elif math.isfinite(mean):
            axes.plot(lr, mean, label="mean", **point)


def _initial(axes: Axes, rows: Sequence[Row], metric: str, low: float, high: float) -> None:
    """Mark the loss before training where it lies in view: a run that ends there has learned nothing."""
    losses = [run.initial(metric) for row in rows for run in row.cell.ended]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    bottom, top = padded(low, high)
    if known and bottom <= (l0 := math.fsum(known) / len(known)) <= top:
        rule(axes, l0, "at initialisation", left=True)


def _diverged(axes: Axes, rows: Sequence[Row], arms: dict[str, Look], lanes: Sequence[str], zone: float) -> None:
    """Draw crosses at the top edge, a lane for each arm, with the share of seeds unless all diverged."""
    if not lanes:
        return
    over = axes.get_xaxis_transform()
    if zone < 1:
        axes.plot([0, 1], [1 - zone] * 2, transform=axes.transAxes, color="0.6", linewidth=0.6)
    for number, arm in enumerate(lanes):
        height = 1 - zone * (number + 0.75) / (len(lanes) + 0.5)
        for row in (row for row in rows if _arm(row, arms) == arm and row.cell.diverged):
            axes.plot(
                _known_lr(row), height, transform=over, label="diverged", **{**DIVERGED, "color": arms[arm].colour}
            )
            if len(row.cell.diverged) < len(row.cell.ended):
                axes.annotate(
                    f"{len(row.cell.diverged)}/{len(row.cell.ended)}",
                    (_known_lr(row), height),
                    xycoords=over,
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=6,
                    color=arms[arm].colour,
                )


def _logits(axes: Axes, rows: Sequence[Row], arms: dict[str, Look]) -> None:
    known = [logit for row in rows if (logit := _logit(row)) is not None]
    low, high = view(known, log=True) or (1.0, LOGIT_CRITICAL)
    low, high = min(low, LOGIT_CRITICAL), max(high, LOGIT_CRITICAL)
    learning_rates(axes, map(_known_lr, rows))
    logarithmic(axes, *padded(low, high, log=True))
    axes.set_ylabel("largest attention logit")
    rule(axes, LOGIT_CRITICAL, "critical", left=True)
    for arm, look in arms.items():
        own = [row for row in rows if _arm(row, arms) == arm]
        x = [_known_lr(row) for row in own]
        y = np.clip([math.nan if (logit := _logit(row)) is None else logit for row in own], low, high)
        axes.plot(x, y, label=arm, **{**look.point(), **look.line()})


def _logit(row: Row) -> float | None:
    """None for one that a logarithmic axis cannot show."""
    logit = row.max_attn_logit
    return logit if logit is not None and math.isfinite(logit) and logit > 0 else None


def _values(row: Row, metric: str) -> list[float]:
    values = (run.metric(metric) for run in row.cell.finite)
    return [value for value in values if value is not None and math.isfinite(value)]


def _marks(rows: Sequence[Row]) -> list[Any]:
    """Legend entries for marks that no arm's name explains."""
    grey = {"color": "0.35", "linestyle": "none"}
    marks = []
    if any(len(row.cell.finite) > 1 for row in rows):
        marks.append(entry("each seed", **{**grey, **SEED}))
    if any(row.degraded and row.metric for row in rows):
        words = f"{DEGRADED_NATS:g} worse, or logits > {DEGRADED_LOGIT:,.0f}"
        marks.append(entry(words, marker="o", markerfacecolor="white", markeredgewidth=0.9, **grey))
    return marks
