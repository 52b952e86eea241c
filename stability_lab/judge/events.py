"""What happened in a run, and when: spikes, level shifts, slow rises, bad and skipped steps, attention alerts.

Every rule looks backwards from the row at which it fires, so that a running run finds what its log shows afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.log import Log, stride_of
from stability_lab.judge.spikes import (
    DEFINITIONS,
    MERGE,
    ROBUST_MIN_WINDOW,
    capped,
    flag_spikes,
    rolling_median,
    trailing_median,
)

# A spike event is a robust spike that also is this far above the median before it: nats of loss, and part of the
# gradient norm (2.0: three times the median). Half of it, and the spike is over.
SPIKE_NATS, SPIKE_PART = 0.1, 2.0
# A level shift: medians of SHIFT_ROWS before and after differ by this much and by SHIFT_DEVIATIONS, and at least half
# of it happens within 2 * EDGE_ROWS.
SHIFT_ROWS, EDGE_ROWS, SHIFT_DEVIATIONS = 50, 10, 3.0
SHIFT_NATS, SHIFT_PART = 0.2, 1.0
# A slow rise: three medians of RISE_ROWS in a row, RISE_ROWS / 2 apart, are this far above the lowest one.
RISE_ROWS = 50
RISE_NATS, RISE_PART = 0.25, 2.0
# Largest attention logits that hurt, and above which every published run diverged (Wortsman et al., 2309.14322).
LOGIT_ALERT, LOGIT_CRITICAL = 1e3, 1e4

SPIKES = frozenset({"loss_spike", "grad_norm_spike"})
DRIFTS = frozenset({"level_shift", "slow_rise"})
# What people call the signals.
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Event:
    """One thing that happened; `step` is its first step.

    `height` is how far it rose above its level before, `value` its largest value, both in the signal's own unit;
    `length` the steps it lasted, `recovery` the steps until the signal was back, None if it never was. None is
    undefined or unknown.
    """

    kind: str
    step: int
    height: float | None
    length: int
    recovery: int | None
    value: float | None
    lr: float | None
    tokens: int | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; the key `event` holds the kind. A NaN is a value that was logged."""
        values = asdict(self)
        return {"step": values.pop("step"), "event": values.pop("kind"), **values}


def find_events(log: Log, start: int = 0) -> list[Event]:
    """The events of a run, by step; with `start` those that show themselves at or after that row of the log.

    Calls with `start` at each flush find together what one call finds at the end; length, recovery and height are as
    known by then. A level shift shows itself SHIFT_ROWS after its step, a slow rise RISE_ROWS.
    """
    found: list[tuple[int, Event]] = []  # with the row at which the event shows itself
    kept = np.flatnonzero(~log.skipped) if log.skipped is not None else np.arange(len(log))
    found += _nonfinite(log, kept)
    found += _skipped(log)
    found += _attention(log)
    for name, whole in log.signals.items():
        series = capped(whole)
        rows = kept[log.has(name)[kept]]
        found += _spikes(log, name, series[rows], rows, start)
        rows = rows[np.isfinite(series[rows])]
        found += _shifts(log, name, series[rows], rows, start)
        found += _rises(log, name, series[rows], rows)
    return sorted((event for row, event in found if row >= start), key=lambda event: (event.step, event.kind))


def can_spike(log: Log) -> bool:
    """Whether any step has enough finite values before it to be tested for spikes."""
    return any(np.count_nonzero(np.isfinite(x)) > ROBUST_MIN_WINDOW for x in log.kept().signals.values())


def _spikes(
    log: Log, name: str, x: NDArray[np.float64], rows: NDArray[np.intp], start: int
) -> Iterator[tuple[int, Event]]:
    """`x` is the signal at `rows` of the log, with its non-finite values."""
    first = max(0, int(np.searchsorted(rows, start)) - MERGE)
    at = first + np.flatnonzero(flag_spikes(x, DEFINITIONS["robust"], start=first))
    at = at[np.isfinite(x[at])]
    median = trailing_median(x, at)
    high = x[at] - median > _margin(name, median, SPIKE_NATS, SPIKE_PART)
    before = dict(zip(at[high].tolist(), median[high].tolist(), strict=True))
    fall, stride = _Falls(x), stride_of(log.step[rows])
    for group in _groups(at[high], MERGE):
        begin, last, level = int(group[0]), int(group[-1]), before[int(group[0])]
        top = float(x[group].max())
        back = fall.first(last + 1, level + _margin(name, level, SPIKE_NATS, SPIKE_PART) / 2)
        times = f", {top / level:.3g} times that" if name == "grad_norm" and level > 0 else ""
        many = "" if group.size == 1 else f", {group.size} spikes"
        yield (
            int(rows[begin]),
            _event(
                log,
                f"{name}_spike",
                rows[[begin, last]],
                None if back is None else int(rows[back]),
                stride,
                height=top - level,
                value=top,
                detail=f"{NAMES[name]} up to {top:.4g} from a median of {level:.4g}{times}{many}",
            ),
        )


def _shifts(
    log: Log, name: str, x: NDArray[np.float64], rows: NDArray[np.intp], start: int
) -> Iterator[tuple[int, Event]]:
    """`x` is the signal at `rows` of the log, all finite."""
    # One SHIFT_ROWS back to the shifts that show themselves now, one to what they may be the end of, one of history.
    begins = _shift_rows(name, x, max(0, int(np.searchsorted(rows, start)) - 3 * SHIFT_ROWS))
    fall, stride = _Falls(rolling_median(x, EDGE_ROWS) if begins else x), stride_of(log.step[rows])
    for begin in begins:
        before = float(np.median(x[begin - SHIFT_ROWS : begin]))
        after = float(np.median(x[begin : begin + SHIFT_ROWS]))
        back = fall.first(begin + 1, (before + after) / 2)
        recovery = None if back is None else int(rows[back + EDGE_ROWS - 1])
        yield (
            int(rows[begin + SHIFT_ROWS - 1]),
            _event(
                log,
                "level_shift",
                rows[[begin, -1]] if recovery is None else np.array([rows[begin], recovery - 1]),
                recovery,
                stride,
                height=after - before,
                value=after,
                detail=f"median {NAMES[name]} of {SHIFT_ROWS} values from {before:.4g} to {after:.4g} at once",
            ),
        )


def _shift_rows(name: str, x: NDArray[np.float64], first: int) -> list[int]:
    """Positions from `first` + SHIFT_ROWS on at which the level of `x` jumps up."""
    x = x[first:]
    n = x.size - 2 * SHIFT_ROWS + 1
    if n < 1:
        return []
    level, edge = rolling_median(x, SHIFT_ROWS), rolling_median(x, EDGE_ROWS)
    at = np.arange(SHIFT_ROWS, SHIFT_ROWS + n)
    before, after = level[at - SHIFT_ROWS], level[at]
    jump = after - before
    hit = (jump > _margin(name, before, SHIFT_NATS, SHIFT_PART)) & (edge[at] - edge[at - EDGE_ROWS] >= jump / 2)
    at = at[hit & (x[at] > (before + after) / 2)]
    if not at.size:
        return []
    past = x[at[:, None] - np.arange(SHIFT_ROWS, 0, -1)]
    spread = 1.4826 * np.median(np.abs(past - level[at - SHIFT_ROWS][:, None]), axis=1)
    at = at[level[at] - level[at - SHIFT_ROWS] > SHIFT_DEVIATIONS * spread]
    return [first + int(group[0]) for group in _groups(at, SHIFT_ROWS)]


def _rises(log: Log, name: str, x: NDArray[np.float64], rows: NDArray[np.intp]) -> Iterator[tuple[int, Event]]:
    """`x` is the signal at `rows` of the log, all finite; one that a level shift explains is no slow rise."""
    half = RISE_ROWS // 2
    levels = rolling_median(x, RISE_ROWS, half)
    fall, stride = _Falls(levels), stride_of(log.step[rows])
    low, near, above = math.inf, 0, 0  # the lowest level, the last sample that was near it, samples in a row above
    j = 0
    while j < levels.size:
        level = float(levels[j])
        low = min(low, level)
        margin = _margin(name, low, RISE_NATS, RISE_PART)
        near = j if level <= low + margin / 4 else near
        above = above + 1 if level > low + margin else 0
        if above < 3:
            j += 1
            continue
        end = half * j + RISE_ROWS - 1
        if _shift_rows(name, x[: end + 1], max(0, half * near - SHIFT_ROWS)):
            low, near, above = level, j, 0  # the new level is the one to rise from
            continue
        begin = end - 2 * half
        back = fall.first(j + 1, low + margin / 2)
        last = levels.size - 1 if back is None else back
        recovery = None if back is None else int(rows[half * last + RISE_ROWS - 1])
        top = float(levels[j - 2 : last + 1].max())
        yield (
            int(rows[end]),
            _event(
                log,
                "slow_rise",
                rows[[begin, -1]] if recovery is None else np.array([rows[begin], recovery - 1]),
                recovery,
                stride,
                height=top - low,
                value=top,
                detail=f"median {NAMES[name]} of {RISE_ROWS} values from {low:.4g} to {top:.4g}, slowly",
            ),
        )
        low, near, above, j = math.inf, last, 0, last + (1 if back is None else 0)


def _nonfinite(log: Log, kept: NDArray[np.intp]) -> Iterator[tuple[int, Event]]:
    signals = log.signals
    bad = {name: log.nonfinite(name) for name in signals}
    for group in _groups(kept[np.any([rows[kept] for rows in bad.values()], axis=0)], MERGE):
        row = int(group[0])
        values = {name: float(x[row]) for name, x in signals.items() if bad[name][row]}
        many = "" if group.size == 1 else f", and {group.size - 1} more steps"
        yield (
            row,
            _event(
                log,
                "nonfinite_step",
                group[[0, -1]],
                None,
                log.stride,
                height=None,
                value=values.get("loss", values.get("grad_norm")),
                detail=" and ".join(f"{NAMES[name]} {value}" for name, value in values.items()) + many,
            ),
        )


def _skipped(log: Log) -> Iterator[tuple[int, Event]]:
    if log.skipped is None:
        return
    for group in _groups(np.flatnonzero(log.skipped), 1):
        row, last = int(group[0]), int(group[-1])
        values = {name: float(x[row]) for name, x in log.signals.items() if log.has(name)[row]}
        known = ", ".join(f"{NAMES[name]} {value:.4g}" for name, value in values.items())
        yield (
            row,
            _event(
                log,
                "skipped_step",
                group[[0, -1]],
                last + 1 if last + 1 < len(log) else None,
                log.stride,
                height=None,
                value=values.get("grad_norm", values.get("loss")),
                detail="the update did not happen" + (f": {known}" if known else ""),
            ),
        )


def _attention(log: Log) -> Iterator[tuple[int, Event]]:
    if log.max_attn_logit is None:
        return
    rows = np.flatnonzero(~np.isnan(log.max_attn_logit))
    x = log.max_attn_logit[rows]
    begun = set()  # one event where a single probe crosses both limits
    for limit, word in ((LOGIT_CRITICAL, "critical"), (LOGIT_ALERT, "alert")):
        for group in _groups(np.flatnonzero(x > limit), 1):
            begin, last = int(group[0]), int(group[-1])
            if begin in begun:
                continue
            begun.add(begin)
            top = float(x[group].max())
            yield (
                int(rows[begin]),
                _event(
                    log,
                    "attention_logit_alert",
                    rows[[begin, last]],
                    int(rows[last + 1]) if last + 1 < rows.size else None,
                    log.stride,
                    height=top - limit,
                    value=top,
                    detail=f"{word}: largest attention logit {top:.4g}, above {limit:g}",
                ),
            )


def _margin(name: str, level: Any, nats: float, part: float) -> Any:
    """How far above `level` counts: nats for a loss, a part of the level for a gradient norm."""
    return part * abs(level) if name == "grad_norm" else nats


def _groups(at: NDArray[np.intp], gap: int) -> list[NDArray[np.intp]]:
    """Positions split where more than `gap` lies between two."""
    return np.split(at, np.flatnonzero(np.diff(at) > gap) + 1) if at.size else []


class _Falls:
    """Finds where a series falls to a level.

    A search costs as much as the way there, and nothing where the series never falls so far.
    """

    def __init__(self, x: NDArray[np.float64]):
        self.x = x
        self.lowest_after = np.fmin.accumulate(x[::-1])[::-1]

    def first(self, begin: int, level: float) -> int | None:
        """First position from `begin` on at which the series is at or below `level`."""
        if begin >= self.x.size or not self.lowest_after[begin] <= level:
            return None
        width = 64
        while True:
            where = np.flatnonzero(self.x[begin : begin + width] <= level)
            if where.size:
                return begin + int(where[0])
            begin, width = begin + width, 2 * width


def _event(
    log: Log,
    kind: str,
    span: NDArray[np.intp],
    recovery: int | None,
    stride: int,
    *,
    height: float | None,
    value: float | None,
    detail: str,
) -> Event:
    """`span` holds the first and last row, `recovery` the row at which the signal was back; `stride` is its own."""
    first, last = int(span[0]), int(span[1])
    lr = None if log.lr is None or not math.isfinite(log.lr[first]) else float(log.lr[first])
    tokens = None if log.tokens is None or not math.isfinite(log.tokens[first]) else int(log.tokens[first])
    step = int(log.step[first])
    return Event(
        kind=kind,
        step=step,
        height=height,
        length=int(log.step[last]) - step + stride,
        recovery=None if recovery is None else int(log.step[recovery]) - step,
        value=value,
        lr=lr,
        tokens=tokens,
        detail=detail,
    )
