"""Differences to the baseline with their intervals, one line each: what the seeds allow to say at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stability_lab.compare.comparison import Comparison, Row
from stability_lab.compare.figures.looks import looks
from stability_lab.compare.figures.style import (
    WIDTH,
    bare_rows,
    interval,
    label,
    legend,
    new_figure,
    padded,
    quantity,
    tested,
    text_rows,
    view,
)
from stability_lab.compare.grouping import setting_text

MOST_ROWS = 80
_LINE = 0.17  # inches of one line of text


@dataclass(frozen=True, eq=False)
class _DifferenceLine:
    """A row of the comparison, or the head of a group where that is None; `y` counts lines of text downwards."""

    text: str
    y: float
    row: Row | None


def differences(comparison: Comparison) -> Figure | None:
    """Draw the differences, grouped by setting; None where no arm has a difference to the baseline."""
    groups = _groups(comparison)
    total = sum(len(rows) for _, rows in groups)
    if not total:
        return None
    lines, height, drawn = _lines(groups)
    figure = new_figure(WIDTH, 0.75 + _LINE * height)
    axes = figure.subplots()
    rows = [(line, line.row) for line in lines if line.row]
    limits = _limits([row for _, row in rows])
    axes.set(xlim=limits, ylim=(height - 0.4, -0.6))
    axes.axvline(0, color="0.2", linewidth=0.8, zorder=1)
    look = looks(comparison.grouping.arms)
    for line, row in rows:
        if row.difference:
            interval(axes, line.y, look[row.cell.arm], row.difference, bool(row.difference.significant), row.cell.arm)
        axes.text(1.02, line.y, _words(row), transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    text_rows(axes, [(line.y, line.text, line.row is None) for line in lines])
    bare_rows(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(f"difference to {label(comparison.grouping.baseline, 40)}: {quantity(comparison.metric)}")
    if drawn < total:
        axes.set_title(f"the first {drawn} of {total} differences")
    known = [row.difference for _, row in rows if row.difference]
    legend(figure, tested(known, "p ≤ 0.05 after Holm, 95% interval", "not significant, or not tested"))
    return figure


def _groups(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    """Rows of all arms but the baseline, by setting, where one of them at least has a difference."""
    found: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if not row.is_baseline and row.cell.ended:
            found.setdefault(setting_text(row.cell.setting), []).append(row)
    return [(name, rows) for name, rows in found.items() if any(row.difference for row in rows)]


def _lines(groups: Sequence[tuple[str, list[Row]]]) -> tuple[list[_DifferenceLine], float, int]:
    """The lines, their height together, and how many rows of the comparison they show."""
    lines: list[_DifferenceLine] = []
    y, drawn = 0.0, 0
    for name, rows in groups:
        if drawn == MOST_ROWS:
            break
        if name:
            lines.append(_DifferenceLine(label(name, 44, lines=1), y, None))
            y += 1
        for row in rows[: MOST_ROWS - drawn]:
            text = label(row.cell.arm, 44)
            extra = text.count("\n")
            lines.append(_DifferenceLine(text, y + extra / 2, row))
            y += 1 + extra
        drawn += len(rows[: MOST_ROWS - drawn])
        y += 0.4
    return lines, y, drawn


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Limits that show zero and the intervals, except those that would flatten the rest."""
    known = [row.difference for row in rows if row.difference]
    ends = [end for d in known for end in (d.value, d.low, d.high) if end is not None]
    low, high = view([*ends, 0.0]) or (0.0, 0.0)
    return padded(min(low, 0.0), max(high, 0.0))


def _words(row: Row) -> str:
    """The difference as a number, with what a reader must know about it."""
    difference, cell = row.difference, row.cell
    words = []
    if difference is not None:
        words.append(f"{difference.value:+.3g}".replace("-", "−") if difference.value else "0")
        if difference.identical:
            words = ["identical"]
        elif difference.low is None:
            words.append("one seed")
    if cell.diverged:
        share = "all" if not cell.finite else f"{len(cell.diverged)} of {len(cell.ended)}"
        words.append(f"{share} diverged")
    return ", ".join(words) or "no result"
