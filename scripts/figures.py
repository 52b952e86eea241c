"""Draws the figures of docs/stabilizers from the stabilizers themselves: python scripts/figures.py

softcap.png    the soft-cap and its slope
factors.png    each layer's factor on its attention logits, and the largest logit that QK-norm then allows
placement.png  where the norms of a residual branch stand
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stability_lab.compare.figures.looks import COLOURS, MARKERS
from stability_lab.seams import PRE_NORM, Placement, Scaling, Seams, Site
from stability_lab.stabilizers.dynamic_scaling import DynamicScaling
from stability_lab.stabilizers.ln_scaling import LNScaling
from stability_lab.stabilizers.perinorm import PeriNorm
from stability_lab.stabilizers.postnorm import PostNorm
from stability_lab.stabilizers.reordered_norm import ReorderedNorm
from stability_lab.stabilizers.softcap import SoftCap

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
DASHES = ("-", "--", ":")
LAYERS, HEAD_DIM = 12, 64


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        softcap().savefig(IMAGES / "softcap.png", dpi=105)
        factors().savefig(IMAGES / "factors.png", dpi=105)
        placement().savefig(IMAGES / "placement.png", dpi=105)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def softcap() -> Figure:
    figure = new_figure(8.4, 3.1)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(0, 150, 601, dtype=torch.float64)  # 1 - tanh^2 cancels in fp32
    left.plot(x, x, color="0.6", linewidth=1, label="no cap")
    for cap, colour, dash in zip((15.0, 30.0, 50.0), COLOURS, DASHES, strict=False):
        module = SoftCap(cap)
        left.plot(x, module(x), color=colour, linestyle=dash, label=f"cap {cap:g}")
        right.plot(x, module.slope(x), color=colour, linestyle=dash, label=f"cap {cap:g}")
    left.set(xlabel="scaled logit", ylabel="capped logit", ylim=(0, 60))
    right.set(xlabel="scaled logit", ylabel="slope: share of gradient that passes", yscale="log", ylim=(1e-6, 1.5))
    right.plot([], [], color="0.6", linewidth=1, label="no cap")
    right.legend(frameon=False, loc="lower left")
    return figure


def factors() -> Figure:
    figure = new_figure(8.4, 3.1)
    left, right = figure.subplots(1, 2)
    layers = range(1, LAYERS + 1)
    modes = {"inverse_layer": DynamicScaling(mode="inverse_layer")} | {
        f"linear, {preset}": DynamicScaling(mode="linear", preset=preset) for preset in ("up", "down", "flat")
    }
    for number, (name, stabilizer) in enumerate(modes.items()):
        factor = attention_factors(stabilizer.apply(Seams()))
        bound = [math.sqrt(HEAD_DIM) * f for f in factor]
        for axes, values in ((left, factor), (right, bound)):
            axes.plot(layers, values, color=COLOURS[number], marker=MARKERS[number], markersize=4, label=name)
    squared = [norm_factor(layer) ** 2 for layer in range(LAYERS)]
    left.plot(layers, squared, color=COLOURS[4], marker="*", markersize=4, linestyle=":", label="ln_scaling (same)")
    left.set(xlabel="layer, from 1", ylabel="factor on attention logits at step 0", ylim=(0, 2.1), xticks=layers)
    right.set(xlabel="layer, from 1", ylabel="largest logit with per-head QK-norm", ylim=(0, 12.8), xticks=layers)
    right.annotate(f"{math.sqrt(HEAD_DIM) / LAYERS:.2f}", (LAYERS, math.sqrt(HEAD_DIM) / LAYERS + 0.4), ha="center")
    left.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    return figure


def attention_factors(seams: Seams) -> list[float]:
    return [factor_of(seams.attn_scale(site(layer))) for layer in range(LAYERS)]


def norm_factor(layer: int) -> float:
    """Both q and k carry it, so that logits carry its square."""
    return factor_of(LNScaling().apply(Seams()).norm_scale(site(layer)))


def site(layer: int) -> Site:
    return Site(layer, LAYERS, "attn", 12 * HEAD_DIM, n_heads=12, n_kv_heads=12, head_dim=HEAD_DIM)


def factor_of(module: Scaling) -> float:
    assert module.factor is not None
    return module.factor.item()


def placement() -> Figure:
    figure = new_figure(8.4, 2.9)
    rows: dict[str, Placement] = {"baseline (pre)": PRE_NORM} | {
        stabilizer.name: stabilizer.apply(Seams()).norm_placement
        for stabilizer in (PostNorm(), ReorderedNorm(), PeriNorm())
    }
    for axes, (name, place) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        draw_branch(axes, name, place)
    return figure


def draw_branch(axes: Axes, name: str, place: Placement) -> None:
    """The residual stream runs up the left side, the branch up the right one."""
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, 10.4), title=name)
    arrow = {"arrowstyle": "-|>", "color": "0.25", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (2.5, 10.2), (2.5, 0), arrowprops=arrow)
    axes.annotate("", (2.9, 6.6), (6.9, 6.6), arrowprops=arrow)
    axes.plot([2.5, 6.9, 6.9], [0.9, 0.9, 6.6], color="0.25", linewidth=1)
    axes.text(
        2.5, 6.6, "+", ha="center", va="center", bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "0.25"}
    )
    box(axes, 6.9, 3.75, "attention\nor MLP", "#DDDDDD")
    for present, x, y in ((place.pre, 6.9, 2.1), (place.branch, 6.9, 5.4), (place.residual, 2.5, 8.0)):
        if present:
            box(axes, x, y, "norm", "#F5C98A")
    if place.final:
        axes.text(3.1, 9.6, "norm before\nthe head", va="center", fontsize=7, color="0.35")


def box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    style = {"boxstyle": "round,pad=0.35", "fc": colour, "ec": "0.25", "lw": 0.8}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=style)


if __name__ == "__main__":
    main()
