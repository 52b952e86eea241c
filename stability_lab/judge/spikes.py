"""Spikes in a series of one value per optimizer step, by the rule of OLMo-core's stability monitor.

A value is a spike when it is above mean + 6 standard deviations of the 128 finite values before it. OLMo 2
(arXiv:2501.00656, section 3.2) defines the score as a percentage, with 7 deviations and 1,000 values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

# Below this deviation a window is flat and nothing that follows it is a spike: rounding is not instability.
_FLAT = 1e-10
# Rows of windows in memory at once (8 MiB at the default window).
_CHUNK = 8192


@dataclass(frozen=True, eq=False)
class SpikeScore:
    """Result of `spike_score`.

    `score` is 100 * n_spikes / n_scored in percent, or None with a `reason`; `resolution` is the score of one
    spike. `indices` are the 0-based positions of the spikes. `n_nonfinite` counts the whole series, with the
    values that stand too early to be scored.
    """

    score: float | None
    reason: str | None
    n_spikes: int
    n_scored: int
    n_nonfinite: int
    resolution: float | None
    indices: NDArray[np.intp]
    window: int
    threshold: float
    two_sided: bool
    name: str = "olmo_core"


def spike_score(x: ArrayLike, *, window: int = 128, threshold: float = 6.0, two_sided: bool = False) -> SpikeScore:
    """Score the series `x` of shape (steps,); a non-finite value is a spike and enters no window.

    Raises `ValueError` for another shape, a window below 2 or a threshold that is not positive.
    """
    series = _series(x)
    flags = flag_spikes(series, window=window, threshold=threshold, two_sided=two_sided)
    finite = np.isfinite(series)
    n_scored = int(np.count_nonzero(_n_finite_before(finite) >= window))
    n_spikes = int(np.count_nonzero(flags))
    reason = None
    if n_scored == 0:
        reason = (
            f"a step is scored against the {window} finite values before it, "
            f"and the run has {series.size} values, {np.count_nonzero(finite)} of them finite"
        )
    return SpikeScore(
        score=100.0 * n_spikes / n_scored if n_scored else None,
        reason=reason,
        n_spikes=n_spikes,
        n_scored=n_scored,
        n_nonfinite=int(np.count_nonzero(~finite)),
        resolution=100.0 / n_scored if n_scored else None,
        indices=np.flatnonzero(flags),
        window=window,
        threshold=threshold,
        two_sided=two_sided,
    )


def flag_spikes(
    x: ArrayLike, *, window: int = 128, threshold: float = 6.0, two_sided: bool = False, start: int = 0
) -> NDArray[np.bool_]:
    """Which of `x[start:]` are spikes, shape (steps - start,), given all of `x` of shape (steps,) as history.

    The flags of a step do not depend on `start`: a run that asks flush by flush gets what it gets at the end.
    A step without `window` finite values before it is never flagged. Raises as `spike_score`.
    """
    series = _series(x)
    if window < 2:
        raise ValueError(f"window is {window}, but a standard deviation needs at least 2 values")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}, but must be a positive number of standard deviations")
    if start < 0:
        raise ValueError(f"start is {start}, but must be a position in the series")
    finite = np.isfinite(series)
    before = _n_finite_before(finite)[start:]
    flags = np.zeros(before.size, dtype=bool)
    scored = np.flatnonzero(before >= window)
    if not scored.size:
        return flags
    windows = sliding_window_view(series[finite], window)
    for chunk in np.array_split(scored, -(-scored.size // _CHUNK)):
        values = series[start + chunk]
        rows = windows[before[chunk] - window]
        # Values near the largest float give an infinite deviation, and then nothing is a spike.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = rows.mean(axis=1)
            deviation = np.sqrt(np.square(rows - mean[:, None]).mean(axis=1))
            outside = values > mean + threshold * deviation
            if two_sided:
                outside |= values < mean - threshold * deviation
        flags[chunk] = ~np.isfinite(values) | (outside & (deviation >= _FLAT))
    return flags


def _series(x: ArrayLike) -> NDArray[np.float64]:
    series = np.asarray(x, dtype=np.float64)
    if series.ndim != 1:
        raise ValueError(f"the series has shape {series.shape}, but must have one value per step")
    return series


def _n_finite_before(finite: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.cumsum(finite, dtype=np.intp) - finite
