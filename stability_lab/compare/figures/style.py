"""What all figures have in common: the text of a label, marks, the part of an axis that is shown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.style import context
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from stability_lab.compare.figures.looks import Look
from stability_lab.compare.statistics import Difference, Mean
from stability_lab.disk.files import replace_file
from stability_lab.text import rough, shown

WIDTH = 7.0  # inches, the width of a page's text; a figure of one panel has half of it
_FONT = "DejaVu Sans"
_STYLE = Path(__file__).with_name("figures.mplstyle")
_DPI = 200
# Dates would make two files of the same runs differ.
_METADATA: Mapping[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_FLAT = 10.0
_LARGEST = 1e100  # an axis and its margins stay within floating point
_UNITS = {
    "val/loss": "validation loss (nats per token)",
    "train/loss": "training loss (nats per token)",
    "val/ppl": "validation perplexity",
    "train/ppl": "training perplexity",
    "val/bits_per_byte": "validation loss (bits per byte)",
    "max_attn_logit": "largest attention logit",
    "rms_growth": "residual RMS, last block over first",
    "weight/rms/embed": "RMS of the token embedding",
    "log_injected_ratio": "log of gradient norm at injected steps over before",
}


@contextmanager
def applied() -> Iterator[None]:
    """Figures look the same whatever the user's matplotlibrc says."""
    with context(["default", _STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; `width` and `height` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Replace `path`, in the format of its suffix; a full disk leaves the old file as it was."""
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=_DPI, metadata=_METADATA.get(path.suffix))
    replace_file(path, picture.getvalue())


# Marks


def text_rows(axes: Axes, rows: Sequence[tuple[float, str, bool]]) -> None:
    """The y axis as lines of text: the height of each, its text, and whether it is the head of a group."""
    axes.yaxis.set_major_locator(FixedLocator([y for y, _, _ in rows]))
    axes.set_yticklabels([text for _, text, _ in rows])
    for tick, (_, _, head) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if head else "normal")


def bare_rows(axes: Axes) -> None:
    """Remove ticks and the left line from an axis whose rows are text."""
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)


def interval(axes: Axes, y: float, look: Look, found: Difference | Mean, filled: bool, name: str) -> None:
    """A value at height `y` with its interval, as far as the axis goes; an arrow at the edge where they lie beyond."""
    low, high = axes.get_xlim()
    if found.low is not None and found.high is not None:
        ends = [max(found.low, low), min(found.high, high)]
        axes.plot(ends, [y, y], color=look.colour, linewidth=1.2, label="interval")
    beyond = [end for end in (found.low, found.high, found.value) if end is not None]
    arrow = {"color": look.colour, "markersize": 4, "linestyle": "none", "clip_on": False, "label": "beyond"}
    if min(beyond) < low:
        axes.plot(low, y, marker=8, **arrow)  # CARETLEFTBASE
    if max(beyond) > high:
        axes.plot(high, y, marker=9, **arrow)
    if low <= found.value <= high:
        axes.plot(found.value, y, label=name, **look.point(filled))


# Texts


def label(text: object, width: int = 64, lines: int = 3) -> str:
    """A name as a figure can show it: no mathematics, no character that the font lacks, in short lines."""
    rows = textwrap.wrap(_drawable(text), width) or [" "]
    if len(rows) > lines:
        rows = [*rows[: lines - 1], f"{rows[lines - 1][: width - 1]}…"]
    return _listed("\n".join(rows))


def brief(text: object, width: int) -> str:
    """The beginning and the end of a name, for a title no wider than its panel."""
    known = _drawable(text)
    if len(known) > width:
        known = f"{known[: width - width // 3 - 1]}…{known[-(width // 3) :]}"
    return _listed(known)


def _drawable(text: object) -> str:
    return "".join(c if ord(c) in _glyphs() else c.encode("unicode_escape").decode() for c in shown(text))


def _listed(text: str) -> str:
    """matplotlib leaves a name that starts with `_` out of a legend."""
    return f" {text}" if text.startswith("_") else text


@cache
def _glyphs() -> frozenset[int]:
    """The characters that the font can draw; matplotlib would warn of any other."""
    fonts = [get_font(findfont(FontProperties(family=_FONT, weight=weight))) for weight in ("normal", "bold")]
    return frozenset(fonts[0].get_charmap()) & frozenset(fonts[1].get_charmap())


def quantity(metric: str) -> str:
    """A metric with its unit, where that is known."""
    return _UNITS.get(metric) or label(metric, 40)


def legend(figure: Figure, entries: Sequence[tuple[Line2D, str]]) -> None:
    """Put a legend below the panels, where it hides nothing; the figure grows by its height."""
    if not entries:
        return
    handles, texts = zip(*entries, strict=True)
    width, height = figure.get_size_inches()
    longest = max(len(line) for text in texts for line in text.split("\n"))
    columns = max(1, min(len(texts), int(width / (0.55 + 0.06 * longest))))
    rows = math.ceil(len(texts) / columns)
    columns = math.ceil(len(texts) / rows)
    most = max(text.count("\n") + 1 for text in texts)
    figure.set_size_inches(width, height + 0.165 * rows * most + 0.1)
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, handlelength=2.6, columnspacing=1.4)


def tested(differences: Iterable[Difference | None], resolved: str, unresolved: str) -> list[tuple[Line2D, str]]:
    """The legend of filled and open marks, as far as `differences` have them."""
    significant = {bool(one and one.significant) for one in differences}
    grey = {"color": "0.35", "marker": "o", "markeredgewidth": 0.9}
    marks = [entry(resolved, **grey), entry(unresolved, markerfacecolor="white", **grey)]
    return [mark for mark, is_filled in zip(marks, (True, False), strict=True) if is_filled in significant]


def entry(text: str, **drawn: Any) -> tuple[Line2D, str]:
    return Line2D([], [], **drawn), text


# Axes


def view(values: Iterable[float], log: bool = False, flat: float = _FLAT) -> tuple[float, float] | None:
    """Choose the part of an axis that is shown, without a margin.

    It covers all finite values but those so far off that they would flatten the rest; None without a finite (log:
    positive) value. A value is far off if it lies more than `flat` times the distance of the quartiles outside of them,
    and at least half of the quartile's size (log: three decades).
    """
    bounds = (1 / _LARGEST, _LARGEST) if log else (-_LARGEST, _LARGEST)
    finite = (v for v in map(float, values) if math.isfinite(v) and (v > 0 or not log))
    known = sorted(min(max(v, bounds[0]), bounds[1]) for v in finite)
    if not known:
        return None
    scale = [math.log10(v) for v in known] if log else known
    last = len(scale) - 1
    low, high = scale[math.floor(0.25 * last)], scale[math.ceil(0.75 * last)]
    above = max(flat * (high - low), 3.0 if log else 0.5 * abs(high))
    below = max(flat * (high - low), 3.0 if log else 0.5 * abs(low))
    inside = [v for v, s in zip(known, scale, strict=True) if low - below <= s <= high + above]
    return inside[0], inside[-1]


def padded(low: float, high: float, log: bool = False, top: float = 0.0, margin: float = 0.06) -> tuple[float, float]:
    """Limits of an axis that shows `low` to `high` with margins and leaves the share `top` free above them."""
    if log:
        lower, upper = padded(math.log10(low), math.log10(high), False, top, margin)
        return 10**lower, 10**upper
    span = high - low or 0.1 * abs(high) or 1.0
    lower, upper = low - margin * span, high + margin * span
    return lower, lower + (upper - lower) / (1 - top)


def near(values: np.ndarray, limits: tuple[float, float], log: bool = False) -> np.ndarray:
    """Move values that no axis of these limits can place towards it: a line may leave the picture, but not by far."""
    low, high = limits
    with np.errstate(invalid="ignore"):
        if log:
            return np.where(values > 0, np.clip(values, low * 1e-3, high * 1e3), np.nan)
        return np.clip(values, low - 20 * (high - low), high + 20 * (high - low))


def logarithmic(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis with a number at each decade, or at 1, 2 and 5 where there are few."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    few = math.log10(high / low) < 2
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def learning_rates(axes: Axes, lrs: Iterable[float], width: float = 0.5 * WIDTH) -> None:
    """A logarithmic x axis that names the learning rates of the sweep, as far as a panel of that width has space."""
    known = sorted(set(lrs))
    axes.set_xscale("log")
    span = math.log(known[-1] / known[0]) or 1.0
    axes.set_xlim(known[0] / math.exp(0.08 * span), known[-1] * math.exp(0.08 * span))
    texts = [rough(lr) for lr in known]
    if len(set(texts)) < len(texts):
        texts = [f"{lr:.6g}" for lr in known]
    apart = (0.03 + 0.02 * max(map(len, texts))) * span * 0.5 * WIDTH / width
    ticks: list[tuple[float, str]] = []
    for lr, text in zip(known, texts, strict=True):
        if not ticks or math.log(lr / ticks[-1][0]) > apart:
            ticks.append((lr, text))
    axes.set_xticks([lr for lr, _ in ticks], [text for _, text in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("peak learning rate")


def rule(axes: Axes, height: float, text: str = "", left: bool = False) -> None:
    """Draw a thin line across the panel, with a name at one end where its number on the axis does not explain it."""
    axes.axhline(height, color="0.45", linewidth=0.7, linestyle=(0, (2, 2)), zorder=1)
    if not text:
        return
    axes.annotate(
        text,
        (0.01 if left else 1, height),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 1.5),
        textcoords="offset points",
        ha="left" if left else "right",
        color="0.35",
        fontsize=6.5,
        zorder=1.5,  # below the data
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
    )
