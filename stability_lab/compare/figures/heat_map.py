"""Shares in a table of tiles: how dark a tile is shows the share, its text the counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import colormaps
from matplotlib.patches import Rectangle

from stability_lab.compare.figures import style

_COLOURS = colormaps["Blues"]
_FRAME = "#D55E00"
CROSS = "×"


class Tile(NamedTuple):
    """`framed`: the share differs from that of the first row. `crossed`: the runs fail in another way."""

    share: float
    text: str
    framed: bool = False
    crossed: bool = False


def draw_heat_map(
    rows: Sequence[str], columns: Sequence[str], tiles: Mapping[tuple[str, str], Tile], title: str, path: Path
) -> None:
    """Write the figure to `path`. `tiles` are by row and column; one that is missing stays white, with a dash."""
    with style.applied():
        figure = style.new_figure(max(0.6 * style.WIDTH, 1.8 + 0.42 * len(columns)), 1.9 + 0.24 * len(rows))
        axes = figure.subplots()
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks(
            [x + 0.5 for x in range(len(columns))], columns, rotation=45, ha="right", rotation_mode="anchor"
        )
        axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
        for y, row in enumerate(rows):
            for x, column in enumerate(columns):
                tile = tiles.get((row, column))
                if tile is None:
                    axes.text(x + 0.5, y + 0.5, "-", ha="center", va="center", color="0.5")
                    continue
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=_COLOURS(0.1 + 0.8 * tile.share), edgecolor="white"))
                words = tile.text + f" {CROSS}" * tile.crossed
                ink = "white" if tile.share > 0.5 else "black"
                axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=6.5, color=ink)
        for (row, column), tile in tiles.items():
            if tile.framed:
                corner = (columns.index(column) + 0.05, rows.index(row) + 0.07)
                axes.add_patch(Rectangle(corner, 0.9, 0.86, fill=False, edgecolor=_FRAME, linewidth=1.3))
        axes.set_title(title)
        frame = {"marker": "s", "linestyle": "none", "markerfacecolor": "none", "markeredgecolor": _FRAME}
        cross = {"marker": "x", "linestyle": "none", "color": "black"}
        marks = [("differs from none (p <= 0.05 by Holm)", frame), ("most runs diverge or do not learn", cross)]
        style.legend(figure, [style.entry(text, **drawn) for text, drawn in marks])
        style.save(figure, path)
