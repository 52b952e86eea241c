"""Spike scores: which values of a series stand out from the values before them, by four definitions.

The published definitions differ in window, threshold and side, and so do their numbers: every score carries all
three. OLMo 2 (arXiv:2501.00656, 3.2), OLMo-core's stability monitor, llm.c's outlier detector, and a robust one of
our own that works in short runs and is not blinded by an earlier spike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

# Below this deviation OLMo-core calls a window flat, and nothing that follows it a spike.
FLAT = 1e-10
# Where a jump out of a flat window is a spike, it must exceed this part of max(1, |mean|): rounding is no jump.
ROUNDING = 1e-12
# Rows closer than this belong to one event: spikes cluster, and a cluster is one thing that happened.
MERGE = 10
RESAMPLES = 2000
# A larger value means the same as this one, and its square is still a number.
_LARGEST = 1e150
# Values in memory at once: 2 MiB of windows stay in the cache.
_CHUNK = 2**18
# Values whose windows share running sums, and the part of such a sum that rounding cannot exceed.
_SUMMED, _ROOM = 2**12, 1e-10


@dataclass(frozen=True)
class Definition:
    """One rule: a value is a spike when it is more than `threshold` deviations above the centre of its window.

    - `kind`: `trailing`, mean and population deviation of the `window` finite values before the value;
      `inclusive`, of the value and the `window` - 1 finite ones before it; `median`, median and 1.4826 times the
      median absolute deviation of those before it.
    - `two_sided`: below the centre counts too.
    - `needs_full_window`: only values with `window` finite ones before them are scored; otherwise the window shrinks
      down to `min_window`.
    - `at_least`: at the threshold counts too.
    - `flat_jumps`: after a window without deviation any other value is a spike; otherwise none is.
    """

    name: str
    window: int
    threshold: float
    two_sided: bool
    kind: Literal["trailing", "inclusive", "median"]
    needs_full_window: bool
    min_window: int
    at_least: bool = False
    flat_jumps: bool = False

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window is {self.window}, but a deviation needs at least 2 values")
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}, but must be a positive number of deviations")
        if not self.needs_full_window and not 2 <= self.min_window <= self.window:
            raise ValueError(f"min_window is {self.min_window}, but must lie between 2 and the window, {self.window}")
        if self.ceiling is not None and self.threshold >= self.ceiling:
            raise ValueError(
                f"threshold is {self.threshold}, but with the value inside its window of {self.window} none is "
                f"{self.ceiling:.2f} deviations away: choose a lower threshold or a longer window"
            )

    @property
    def ceiling(self) -> float | None:
        """The most deviations that a value can have: sqrt(window - 1) where the value is inside its window."""
        return math.sqrt(self.window - 1) if self.kind == "inclusive" else None

    @property
    def needs(self) -> int:
        """Finite values that a value must have before it to be scored."""
        return self.window if self.needs_full_window else self.min_window

    @property
    def label(self) -> str:
        """Name, window and threshold: scores with different ones do not compare."""
        return f"{self.name}[W={self.window},k={self.threshold:g}]"


# The robust rule, calibrated on healthy short runs: docs/judge.md.
ROBUST_WINDOW, ROBUST_MIN_WINDOW, ROBUST_THRESHOLD = 64, 20, 7.0

DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        definition.name: definition
        for definition in (
            Definition("olmo2", 1000, 7.0, True, "trailing", True, 1000, at_least=True, flat_jumps=True),
            Definition("olmo_core", 128, 6.0, False, "trailing", True, 128),
            Definition("llm_c", 128, 7.0, False, "inclusive", True, 128),
            Definition(
                "robust", ROBUST_WINDOW, ROBUST_THRESHOLD, False, "median", False, ROBUST_MIN_WINDOW, flat_jumps=True
            ),
        )
    }
)


@dataclass(frozen=True, eq=False)
class SpikeScore:
    """Result of `spike_score`.

    `score` is 100 * n_spikes / n_scored in percent, or None with a `reason`; `resolution` is the score of one spike;
    `interval` holds 95%, or is None where fewer than 20 values are scored. `indices` are the 0-based positions of the
    spikes. `n_nonfinite` counts the whole series, with the values that stand too early to be scored.
    """

    name: str
    window: int
    threshold: float
    two_sided: bool
    score: float | None
    reason: str | None
    n_spikes: int
    n_scored: int
    n_nonfinite: int
    resolution: float | None
    interval: tuple[float, float] | None
    indices: NDArray[np.intp]
    ceiling: float | None = None
    min_window: int | None = None

    def as_dict(self, steps: ArrayLike | None = None) -> dict[str, Any]:
        """JSON-able; the spikes by their entry in `steps`, without it by their position."""
        at = self.indices if steps is None else np.asarray(steps)[self.indices]
        return {
            "definition": self.name,
            "window": self.window,
            "min_window": self.min_window,
            "threshold": self.threshold,
            "two_sided": self.two_sided,
            "ceiling": self.ceiling,
            "score": self.score,
            "reason": self.reason,
            "interval": None if self.interval is None else list(self.interval),
            "resolution": self.resolution,
            "n_spikes": self.n_spikes if self.score is not None else None,
            "n_scored": self.n_scored,
            "n_nonfinite": self.n_nonfinite,
            "steps": [int(step) for step in at],
        }


def spike_score(x: ArrayLike, definition: Definition = DEFINITIONS["olmo_core"], seed: int = 0) -> SpikeScore:
    """Score the series `x` of shape (steps,); a non-finite value is a spike and enters no window.

    `seed` is that of the bootstrap. Raises `ValueError` for another shape.
    """
    series = _series(x)
    flags = flag_spikes(series, definition)
    finite = np.isfinite(series)
    scored = _n_finite_before(finite) >= definition.needs
    n_scored, n_spikes = int(np.count_nonzero(scored)), int(np.count_nonzero(flags))
    reason = None
    if n_scored == 0:
        reason = (
            f"a value is scored against the {definition.needs} finite ones before it, "
            f"and the series has {series.size} values, {np.count_nonzero(finite)} of them finite"
        )
    return SpikeScore(
        name=definition.name,
        window=definition.window,
        threshold=definition.threshold,
        two_sided=definition.two_sided,
        score=100.0 * n_spikes / n_scored if n_scored else None,
        reason=reason,
        n_spikes=n_spikes,
        n_scored=n_scored,
        n_nonfinite=int(np.count_nonzero(~finite)),
        resolution=100.0 / n_scored if n_scored else None,
        interval=_interval(flags[scored], seed),
        indices=np.flatnonzero(flags),
        ceiling=definition.ceiling,
        min_window=definition.needs,
    )


def spike_scores(x: ArrayLike) -> dict[str, SpikeScore]:
    """The score of `x` by every definition."""
    return {name: spike_score(x, definition) for name, definition in DEFINITIONS.items()}


def flag_spikes(x: ArrayLike, definition: Definition = DEFINITIONS["olmo_core"], start: int = 0) -> NDArray[np.bool_]:
    """Which of `x[start:]` are spikes, shape (steps - start,), given all of `x` of shape (steps,) as history.

    The flags of a step do not depend on `start`: a run that asks flush by flush gets what it gets at the end. A value
    with too few finite ones before it is never flagged. Raises `ValueError` for another shape or a negative start.
    """
    series = _series(x)
    if start < 0:
        raise ValueError(f"start is {start}, but must be a position in the series")
    finite = np.isfinite(series)
    before = _n_finite_before(finite)
    flags = ~finite & (before >= definition.needs)
    at = start + np.flatnonzero((finite & (before >= definition.needs))[start:])
    history, inside = series[finite], definition.kind == "inclusive"
    if definition.kind != "median":
        at = at[_may_be_outside(series[at], history, before[at] + inside, definition)]
    for rows, windows in _windows(history, before[at] + inside, definition.window):
        flags[at[rows]] = _outside(series[at[rows]], windows, definition)
    return flags[start:]


def trailing_level(x: ArrayLike, at: ArrayLike, window: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Median and robust deviation of up to `window` finite values of `x` before each position in `at`.

    The deviation is that of the kind `median`; both are NaN where there is no value.
    """
    series = _series(x)
    finite = np.isfinite(series)
    positions = np.asarray(at, dtype=np.intp)
    medians, deviations = np.full(positions.size, np.nan), np.full(positions.size, np.nan)
    for rows, windows in _windows(series[finite], _n_finite_before(finite)[positions], window):
        ordered = np.sort(windows, axis=1)
        medians[rows] = _sorted_median(ordered)
        deviations[rows] = _robust_deviation(ordered, medians[rows])
    return medians, deviations


def rolling_median(x: NDArray[np.float64], width: int, every: int = 1) -> NDArray[np.float64]:
    """Median of `x[i : i + width]` for i = 0, `every`, 2 `every`, ...; `x` is finite."""
    ends = np.arange(width, x.size + 1, every)
    medians = np.empty(ends.size)
    for rows, windows in _windows(x, ends, width):
        medians[rows] = _sorted_median(np.sort(windows, axis=1))
    return medians


def needed_steps(p1: float, p2: float, power: float = 0.8) -> int:
    """Scored steps that each of two runs needs before their spike rates `p1` and `p2`, as fractions, differ visibly.

    With a power of 0.5, (2 sqrt(p1 + p2) / (p1 - p2))²; with 0.8, twice as many. Spikes cluster, so count events.
    """
    if not (0 <= p1 <= 1 and 0 <= p2 <= 1 and p1 != p2):
        raise ValueError(f"rates are {p1} and {p2}, but must be two different fractions")
    if power not in (0.5, 0.8):
        raise ValueError(f"power is {power}, but must be 0.5 or 0.8")
    half = 4 * (p1 + p2) / (p1 - p2) ** 2
    # Rounded first, so that 8000.000000000001 is 8000.
    return math.ceil(round(half if power == 0.5 else 2 * half, 6))


def _outside(values: NDArray[np.float64], windows: NDArray[np.float64], rule: Definition) -> NDArray[np.bool_]:
    # Values near the largest float give an infinite deviation, and then nothing is a spike.
    with np.errstate(over="ignore", invalid="ignore"):
        if rule.kind == "median":
            ordered = np.sort(windows, axis=1)
            centre = _sorted_median(ordered)
            distance = np.abs(values - centre) if rule.two_sided else values - centre
            # Half of the values lie within the deviation, so that it is not less than the way to the nearer quartile.
            quarter = ordered.shape[1] // 4
            nearer = np.minimum(centre - ordered[:, quarter], ordered[:, -1 - quarter] - centre)
            scale = 1.4826 * (1 - 1e-9) * nearer
            rows = distance >= rule.threshold * scale
            scale[rows] = _robust_deviation(ordered[rows], centre[rows])
        else:
            centre = windows.mean(axis=1)
            distance = np.abs(values - centre) if rule.two_sided else values - centre
            windows -= centre[:, None]
            scale = np.sqrt(np.einsum("ij,ij->i", windows, windows) / windows.shape[1])
        far = distance >= rule.threshold * scale if rule.at_least else distance > rule.threshold * scale
        if rule.flat_jumps:
            return far & (distance > ROUNDING * np.maximum(1.0, np.abs(centre)))
        return far & (scale >= FLAT)


def _robust_deviation(ordered: NDArray[np.float64], centre: NDArray[np.float64]) -> NDArray[np.float64]:
    """1.4826 median absolute deviations of sorted rows from their medians, shape (rows, window) and (rows,)."""
    distances = np.abs(ordered - centre[:, None])
    deviation = 1.4826 * _sorted_median(np.sort(distances, axis=1))
    # More than half of the values are equal, as in rounded logs: the mean absolute deviation instead.
    return np.where(deviation > 0, deviation, 1.2533 * distances.mean(axis=1))


def _may_be_outside(
    values: NDArray[np.float64], history: NDArray[np.float64], ends: NDArray[np.intp], rule: Definition
) -> NDArray[np.bool_]:
    """False where running sums show that a value is no spike, with room for rounding: the rest needs its window."""
    possible = np.ones(values.size, dtype=np.bool_)
    for start in range(0, values.size, _SUMMED):
        rows = slice(start, start + _SUMMED)
        begins = ends[rows] - rule.window
        if begins[0] < 0:
            continue
        past = history[begins[0] : ends[rows][-1]]
        centre, begins = past.mean(), begins - begins[0]
        deviations = past - centre
        sums, squares = (np.r_[0.0, np.cumsum(x)] for x in (deviations, deviations**2))
        mean = (sums[begins + rule.window] - sums[begins]) / rule.window
        variance = (squares[begins + rule.window] - squares[begins]) / rule.window - mean**2
        distance = values[rows] - centre - mean
        if rule.two_sided:
            distance = np.abs(distance)
        # Room for the variance, for the mean, and for the mean of the window itself, which decides in the end.
        room = _ROOM * squares[-1]
        distance += np.sqrt(room * _ROOM * past.size) + 1e-14 * np.abs(past).max()
        possible[rows] = distance >= rule.threshold * np.sqrt(np.maximum(variance - room, 0.0))
    return possible


def _windows(
    history: NDArray[np.float64], ends: NDArray[np.intp], window: int
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float64]]]:
    """Contiguous copies of the `window` values of `history` up to each of `ends`, in chunks: (which, values).

    An end below `window` has its own, shorter chunk; an end of 0 has none.
    """
    for row in np.flatnonzero((ends < window) & (ends > 0)):
        yield np.array([row]), history[: ends[row]][None].copy()
    full = np.flatnonzero(ends >= window)
    if full.size:
        views = sliding_window_view(history, window)
        for rows in np.array_split(full, -(-full.size * window // _CHUNK)):
            if rows.size:
                yield rows, views[ends[rows] - window]


def _sorted_median(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of sorted rows. Sorting short rows is faster than selecting, because NumPy has vector code for it."""
    middle = ordered.shape[1] // 2
    if ordered.shape[1] % 2:
        return ordered[:, middle]
    return 0.5 * ordered[:, middle - 1] + 0.5 * ordered[:, middle]


def _interval(flags: NDArray[np.bool_], seed: int) -> tuple[float, float] | None:
    """95% of the score: the scored values are drawn anew in blocks of up to 50, with every event kept whole.

    Without a spike there is nothing to draw: then 0 and the rate at which n values have none with 5% probability.
    """
    n = flags.size
    if n < 20:
        return None
    spikes = np.flatnonzero(flags)
    if not spikes.size:
        return 0.0, 100.0 * (1 - 0.05 ** (1 / n))
    block = min(50, n // 20)
    n_blocks = n // block
    begins = np.r_[True, np.diff(spikes) > MERGE]
    first = spikes[begins][np.cumsum(begins) - 1]
    per_block = np.bincount(np.minimum(first // block, n_blocks - 1), minlength=n_blocks)
    # Blocks with the same number of spikes are alike, so it is enough to draw how many of each kind come.
    sizes, counts = np.unique(per_block, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(n_blocks, counts / n_blocks, size=RESAMPLES) @ sizes
    low, high = np.percentile(100.0 * drawn / n, [2.5, 97.5])
    return float(low), float(min(high, 100.0))


def _series(x: ArrayLike) -> NDArray[np.float64]:
    series = np.asarray(x, dtype=np.float64)
    if series.ndim != 1:
        raise ValueError(f"the series has shape {series.shape}, but must have one value per step")
    return capped(series)


def capped(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """`x` with its finite values within +-1e150, so that no sum or square of them overflows."""
    large = np.isfinite(x) & (np.abs(x) > _LARGEST)
    return np.where(large, np.copysign(_LARGEST, x), x) if large.any() else x


def _n_finite_before(finite: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.cumsum(finite, dtype=np.intp) - finite
