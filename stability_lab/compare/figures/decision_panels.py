"""The decision in one picture.

It shows what each arm gains where all are at their best, how much its learning rate still matters, which learning rates
it can take, and what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stability_lab.compare.comparison import Comparison
from stability_lab.compare.decision import Tuned, tuned
from stability_lab.compare.figures.looks import Look, looks
from stability_lab.compare.figures.style import (
    WIDTH,
    bare_rows,
    entry,
    interval,
    label,
    learning_rates,
    legend,
    new_figure,
    padded,
    tested,
    text_rows,
    view,
)
from stability_lab.compare.grouping import setting_text
from stability_lab.compare.ladders import Ladder
from stability_lab.compare.statistics import Difference, Mean
from stability_lab.judge.lr_sensitivity import EDGE_NATS, USABLE_NATS

MOST_ROWS = 40
_FLAT = 1000.0  # an interval is cut where it would hide the others, not where it is wide
_LINE = 0.24  # inches of a row
_FAR = {"marker": "o", "color": "0.6", "markerfacecolor": "white", "markersize": 3, "linestyle": "none"}
_CROSS = {"marker": "x", "color": "0.6", "markersize": 4, "linestyle": "none"}


@dataclass(frozen=True, eq=False)
class _PanelLine:
    """A ladder, the baseline's without `tuned`; the head of a group has neither."""

    text: str
    ladder: Ladder | None = None
    tuned: Tuned | None = None


def decision(comparison: Comparison) -> Figure | None:
    """None where no arm has two learning rates beside a baseline that has them."""
    lines = _lines(comparison)
    if not lines:
        return None
    shown = lines[:MOST_ROWS]
    arms = [line.tuned for line in shown if line.tuned]
    panels = [_loss, _sensitivity, _usable] + [_speed] * any(one.speed is not None for one in arms)
    figure = new_figure(WIDTH, 0.95 + _LINE * len(shown))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    look = looks(comparison.grouping.arms)
    grid[0].set_ylim(len(shown) - 0.4, -0.6)
    text_rows(grid[0], [(y, line.text, line.ladder is None) for y, line in enumerate(shown)])
    for axes, draw in zip(grid, panels, strict=True):
        bare_rows(axes)
        draw(axes, shown, look)
    if len(lines) > len(shown):
        figure.suptitle(f"the first {len(shown)} of {len(lines)} rows")
    legend(figure, _marks(shown))
    return figure


def _lines(comparison: Comparison) -> list[_PanelLine]:
    """Lines by setting of the other keys: a head where there are several settings, the baseline, the other arms."""
    found: dict[str, list[_PanelLine]] = {}
    for one in tuned(comparison):
        setting = setting_text(one.base.setting)
        rows = found.setdefault(setting, [_PanelLine(label(one.base.arm, 30), one.base)])
        rows.append(_PanelLine(label(one.ladder.arm, 30), one.ladder, one))
    lines = []
    for setting, rows in found.items():
        lines += [_PanelLine(label(setting, 36, lines=1))] if setting else []
        lines += rows
    return lines


def _loss(axes: Axes, lines: Sequence[_PanelLine], look: Mapping[str, Look]) -> None:
    known = [one.difference for line in lines if (one := line.tuned) and one.difference]
    low, high = _extent(known) or (0.0, 0.0)
    axes.set_xlim(padded(min(low, 0.0), max(high, 0.0)))
    axes.axvline(0, color="0.2", linewidth=0.8, zorder=1)
    for y, line in enumerate(lines):
        difference = line.tuned.difference if line.tuned else None
        if line.ladder and difference:
            arm = line.ladder.arm
            interval(axes, y, look[arm], difference, bool(difference.significant), arm)
    _quantity(axes, "best against best:\nloss minus the baseline's (nats)")


def _sensitivity(axes: Axes, lines: Sequence[_PanelLine], look: Mapping[str, Look]) -> None:
    known = [line.ladder.sensitivity for line in lines if line.ladder and line.ladder.sensitivity]
    low, high = _extent(known) or (0.0, 1.0)
    axes.set_xlim(padded(min(low, 0.0), high))
    for y, line in enumerate(lines):
        if line.ladder and (mean := line.ladder.sensitivity):
            change = line.ladder.difference
            filled = bool(change and change.significant)
            interval(axes, y, look[line.ladder.arm], mean, filled, line.ladder.arm)
    _quantity(axes, "LR sensitivity (nats):\nless is more robust")


def _usable(axes: Axes, lines: Sequence[_PanelLine], look: Mapping[str, Look]) -> None:
    learning_rates(axes, [lr for line in lines if line.ladder for lr in line.ladder.lrs], width=0.25 * WIDTH)
    for y, line in enumerate(lines):
        if (ladder := line.ladder) is None:
            continue
        near, fair, far, diverged = _sorted(ladder)
        own = look[ladder.arm]
        axes.plot(*_row(sorted([*near, *fair]), y), color=own.colour, linewidth=2.2, alpha=0.4, label="bar", zorder=1.5)
        axes.plot(*_row(near, y), label=ladder.arm, **own.point())
        axes.plot(*_row(fair, y), label="fair", **own.point(filled=False))
        axes.plot(*_row(far, y), label="far", **_FAR)
        axes.plot(*_row(diverged, y), label="diverged", **_CROSS)
    axes.set_xlabel(f"learning rates within {EDGE_NATS:g} nats\nof its best (filled: {USABLE_NATS:g})")


def _sorted(ladder: Ladder) -> tuple[list[float], list[float], list[float], list[float]]:
    """Sort an arm's learning rates into as good as the best, nearly so, worse, and those at which a seed diverged."""
    known = [(lr, loss) for lr, loss in zip(ladder.lrs, ladder.losses, strict=True) if loss is not None]
    usable, near = (ladder.usable.usable, ladder.usable.near) if ladder.usable else ((), ())
    far = [lr for lr, loss in known if math.isfinite(loss) and lr not in near]
    diverged = [lr for lr, loss in known if not math.isfinite(loss)]
    return list(usable), [lr for lr in near if lr not in usable], far, diverged


def _speed(axes: Axes, lines: Sequence[_PanelLine], look: Mapping[str, Look]) -> None:
    ratios = [line.tuned.speed for line in lines if line.tuned and line.tuned.speed is not None]
    axes.set_xlim(padded(min(1.0, *ratios), max(1.0, *ratios)))
    axes.axvline(1, color="0.2", linewidth=0.8, zorder=1)
    for y, line in enumerate(lines):
        if line.ladder and line.tuned and line.tuned.speed is not None:
            axes.plot(line.tuned.speed, y, label=line.ladder.arm, **look[line.ladder.arm].point())
    _quantity(axes, "tokens/s relative\nto the baseline's")


def _extent(found: Sequence[Difference | Mean]) -> tuple[float, float] | None:
    """The values to show: zero, and all values with their intervals."""
    return view([0.0, *(v for one in found for v in (one.value, one.low, one.high) if v is not None)], flat=_FLAT)


def _row(xs: Sequence[float], y: float) -> tuple[Sequence[float], list[float]]:
    return xs, [y] * len(xs)


def _quantity(axes: Axes, text: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel(text)


def _marks(lines: Sequence[_PanelLine]) -> list:
    tests = [test for line in lines if line.tuned for test in (line.tuned.difference, line.tuned.ladder.difference)]
    marks = tested(tests, "differs from the baseline (p ≤ 0.05 by Holm)", "not distinguishable, or not tested")
    rates = [_sorted(line.ladder) for line in lines if line.ladder]
    if any(far for _, _, far, _ in rates):
        marks.append(entry("learning rate further from the best", **_FAR))
    if any(diverged for *_, diverged in rates):
        marks.append(entry("learning rate at which a seed diverged", **_CROSS))
    return marks
