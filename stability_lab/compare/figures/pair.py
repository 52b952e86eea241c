"""A few signals of runs on the same batches below each other, over one axis of steps: when one left the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from stability_lab.compare.figures import style
from stability_lab.compare.figures.curves import running_median, steps
from stability_lab.compare.figures.looks import looks
from stability_lab.compare.run_record import RunRecord

_UNITS = {
    "train/loss": "training loss (nats)",
    "optim/grad_norm": "gradient norm",
    "attn/max_abs_logit": "largest attention logit",
}
_LINEAR = ("train/loss",)


def draw_pair(runs: Mapping[str, RunRecord], columns: Sequence[str], title: str, path: Path) -> None:
    """Write the figure to `path`, in the format of its suffix. `runs` are by arm, the one that fails first."""
    series = {arm: run.series("step", *columns) for arm, run in runs.items()}
    look = looks(list(runs))
    with style.applied():
        figure = style.new_figure(0.8 * style.WIDTH, 0.6 + 1.7 * len(columns))
        figure.suptitle(title)
        panels = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
        for axes, column in zip(panels, columns, strict=True):
            log = column not in _LINEAR
            low, high = style.view((v for own in series.values() for v in own[column]), log) or (1.0, 1.0)
            limits = style.padded(low, high, log)
            if log:
                style.logarithmic(axes, *limits)
            else:
                axes.set_ylim(*limits)
            axes.set_ylabel(_UNITS.get(column, column))
            for arm, own in series.items():
                known = np.isfinite(own[column])
                step, values = steps(own["step"])[known], style.near(own[column], limits, log)[known]
                axes.plot(step, values, color=look[arm].colour, linewidth=0.6, alpha=0.4)
                axes.plot(step, running_median(values), **look[arm].line())
        panels[-1].set_xlabel("optimizer step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
        style.legend(figure, [style.entry(style.label(arm), **look[arm].line()) for arm in runs])
        style.save(figure, path)
