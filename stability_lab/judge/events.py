"""What happened in a run, and when: spikes, level shifts, slow rises, bad and skipped steps, attention alerts.

Every rule looks backwards from the row at which it fires, so that a running run finds what its log shows afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.departures import EDGE_ROWS, FLOORS, RISE_ROWS, Drift, Spike, rises, shifts, spikes
from stability_lab.judge.log import Log, stride_of
from stability_lab.judge.spikes import MERGE, capped

# Largest attention logits that hurt, and above which every published run diverged (Wortsman et al., 2309.14322).
LOGIT_ALERT, LOGIT_CRITICAL = 1e3, 1e4
# A learning rate that is so many times that of the row before, and falls as steeply within LR_ROWS, was a fault.
LR_JUMP, LR_ROWS = 3.0, 50
# So many gradient norms of exactly 0 in a row, or so many steps with a learning rate of 0, are no chance.
STILL_ROWS = 10
# A slow rise that begins so soon after a spike is its tail: medians of 50 values lag behind it.
TAIL_ROWS = 2 * RISE_ROWS

SPIKES = frozenset({"loss_spike", "grad_norm_spike"})
DRIFTS = frozenset({"level_shift", "slow_rise"})
STANDSTILLS = frozenset({"zero_gradient", "no_update"})
# What people call the signals.
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Event:
    """One thing that happened; `step` is its first step.

    `height` is how far it rose above its level before, `value` its largest value, both in the signal's own unit;
    `length` the steps it lasted, `recovery` the most steps until the signal was back, None if it never was. `signal` is
    its series, where it has one, and `count` how often it left its level, in a burst more than once. `cause` is `data`
    where a level shift changes nothing but the level, and `batch` where several runs have a spike at the same step
    (`shared_spikes`). None is undefined or unknown.
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
    signal: str | None = None
    count: int = 1
    cause: Literal["data", "batch"] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; the key `event` holds the kind. A NaN is a value that was logged."""
        values = asdict(self)
        return {"step": values.pop("step"), "event": values.pop("kind"), **values}


def find_events(log: Log, start: int = 0) -> list[Event]:
    """The events of a run, by step; with `start` those that show themselves at or after that row of the log.

    Calls with `start` at each flush find together what one call finds at the end; length, recovery, height and cause
    are as known by then. A level shift shows itself 50 rows after its step, a slow rise 50.
    """
    found: list[tuple[int, Event]] = []  # with the row at which the event shows itself
    kept = np.flatnonzero(~log.skipped) if log.skipped is not None else np.arange(len(log))
    found += _nonfinite(log, kept)
    found += _skipped(log)
    found += _attention(log)
    found += _standstills(log, kept)
    found += _lr_spikes(log)
    for name, whole in log.signals.items():
        signal = Signal(log, name, kept[log.has(name)[kept]], capped(whole))
        found += signal.spikes(start)
        found += signal.drifts(start)
    return sorted((event for row, event in found if row >= start), key=lambda event: (event.step, event.kind))


def unexplained(events: Sequence[Event], stride: int = 1) -> list[Event]:
    """The events without spikes that are the edge of a level shift, and slow rises that are the tail of a spike.

    A shift that is over is a long spike, unless it may be the data.
    """

    def explains(cause: Event, event: Event) -> bool:
        if cause.signal != event.signal:
            return False
        if cause.kind == "level_shift" and event.kind in SPIKES and (cause.recovery is None or cause.cause == "data"):
            return abs(event.step - cause.step) <= EDGE_ROWS * stride
        tail = cause.kind in SPIKES and cause.recovery is not None and event.kind == "slow_rise"
        return tail and 0 <= event.step - cause.step <= TAIL_ROWS * stride

    causes = [event for event in events if event.kind in SPIKES or event.kind == "level_shift"]
    return [event for event in events if not any(explains(cause, event) for cause in causes if cause is not event)]


class Signal:
    """One signal of a log without skipped steps: `x` at `rows`, and `y` in the unit of `departures`."""

    def __init__(self, log: Log, name: str, rows: NDArray[np.intp], whole: NDArray[np.float64]):
        self.log, self.name, self.rows, self.x = log, name, rows, whole[rows]
        self.floors, self.stride = FLOORS[name], stride_of(log.step[rows])
        # The noise of a norm is in proportion to it. One of 0 has no logarithm, and is an event of its own.
        with np.errstate(divide="ignore", invalid="ignore"):
            self.y = np.log(np.where(self.x > 0, self.x, np.nan)) if name == "grad_norm" else self.x

    def spikes(self, start: int) -> Iterator[tuple[int, Event]]:
        for spike in spikes(self.y, self.floors, int(np.searchsorted(self.rows, start))):
            yield int(self.rows[spike.begin]), self._spike(spike)

    def drifts(self, start: int) -> Iterator[tuple[int, Event]]:
        finite = np.isfinite(self.y)
        rows, y = self.rows[finite], self.y[finite]
        jumps = shifts(y, self.floors, int(np.searchsorted(rows, start)))
        for word, found in (("level_shift", jumps), ("slow_rise", rises(y, self.floors))):
            for drift in found:
                yield int(rows[drift.seen]), self._drift(word, drift, rows)

    def _value(self, y: float) -> float:
        return math.exp(y) if self.name == "grad_norm" else y

    def _spike(self, spike: Spike) -> Event:
        level, top = self._value(spike.level), float(self.x[spike.flagged].max())
        times = f", {top / level:.3g} times that" if self.name == "grad_norm" and level > 0 else ""
        many = f", {spike.count} times" if spike.count > 1 else ""
        return _event(
            self.log,
            f"{self.name}_spike",
            self.rows[spike.flagged[[0, -1]]],
            None if spike.away is None else tuple(self.rows[list(spike.away)].tolist()),
            self.stride,
            height=top - level,
            value=top,
            detail=f"{NAMES[self.name]} up to {top:.4g} from a level of {level:.4g}{times}{many}",
            signal=self.name,
            count=spike.count,
        )

    def _drift(self, kind: str, drift: Drift, rows: NDArray[np.intp]) -> Event:
        back = None if drift.back is None else int(rows[drift.back])
        low, top = self._value(drift.low), self._value(drift.top)
        how = "rises slowly" if kind == "slow_rise" else "jumps"
        data = ", and falls on as before, as when the data change" if drift.falls_on else ""
        return _event(
            self.log,
            kind,
            np.array([rows[drift.begin], rows[-1] if back is None else back - 1]),
            None if back is None else (int(rows[drift.begin]), back),
            self.stride,
            height=top - low,
            value=top,
            detail=f"median {NAMES[self.name]} {how} from {low:.4g} to {top:.4g}{data}",
            signal=self.name,
            cause="data" if drift.falls_on else None,
        )


def _nonfinite(log: Log, kept: NDArray[np.intp]) -> Iterator[tuple[int, Event]]:
    signals = log.signals
    bad = {name: log.nonfinite(name) for name in signals}
    for at in _groups(np.flatnonzero(np.any([rows[kept] for rows in bad.values()], axis=0)), MERGE):
        group, after = kept[at], int(at[-1]) + 1
        row = int(group[0])
        values = {name: float(x[row]) for name, x in signals.items() if bad[name][row]}
        many = "" if group.size == 1 else f", and {group.size - 1} more {'step' if group.size == 2 else 'steps'}"
        yield (
            row,
            _event(
                log,
                "nonfinite_step",
                group[[0, -1]],
                (row, int(kept[after])) if after < kept.size else None,
                log.stride,
                height=None,
                value=values.get("loss", values.get("grad_norm")),
                detail=" and ".join(f"{NAMES[name]} {value}" for name, value in values.items()) + many,
                signal=next((name for name in ("loss", "grad_norm") if name in bad and bad[name][group].any()), None),
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
                (row, last + 1) if last + 1 < len(log) else None,
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
                    (int(rows[begin]), int(rows[last + 1])) if last + 1 < rows.size else None,
                    log.stride,
                    height=top - limit,
                    value=top,
                    detail=f"{word}: largest attention logit {top:.4g}, above {limit:g}",
                ),
            )


def _standstills(log: Log, kept: NDArray[np.intp]) -> Iterator[tuple[int, Event]]:
    """Gradients of exactly 0, and gradients that a learning rate of 0 makes nothing of, for STILL_ROWS or more."""
    if log.grad_norm is None:
        return
    kept = kept[log.has("grad_norm")[kept]]
    norm = log.grad_norm[kept]
    halted = np.zeros(norm.size, dtype=np.bool_) if log.lr is None else (log.lr[kept] == 0) & (norm > 0)
    for kind, which, what in (
        ("zero_gradient", norm == 0, "gradient norm is exactly 0"),
        ("no_update", halted, "learning rate is exactly 0, so that the gradient changes nothing,"),
    ):
        for group in _groups(np.flatnonzero(which), 1):
            if group.size < STILL_ROWS:
                continue
            rows, ended = kept[group], int(group[-1]) + 1
            back = int(kept[ended]) if ended < kept.size else None
            yield (
                int(rows[STILL_ROWS - 1]),
                _event(
                    log,
                    kind,
                    rows[[0, -1]],
                    None if back is None else (int(rows[0]), back),
                    log.stride,
                    height=None,
                    value=float(log.grad_norm[rows].max()),
                    detail=f"the {what} in {group.size:,} values" + (", to the end of the log" if back is None else ""),
                    signal="grad_norm",
                ),
            )


def _lr_spikes(log: Log) -> Iterator[tuple[int, Event]]:
    """Learning rates that jump up and down again, as no schedule does: one that restarts does not jump down."""
    if log.lr is None:
        return
    rows = np.flatnonzero(log.lr > 0)
    lr = log.lr[rows]
    ratio = lr[1:] / lr[:-1]
    falls, end = 1 + np.flatnonzero(ratio * LR_JUMP < 1), 0
    for begin in 1 + np.flatnonzero(ratio > LR_JUMP):
        later = falls[(falls > begin) & (falls <= begin + LR_ROWS)]
        if begin < end or not later.size or lr[later[0]] > LR_JUMP * lr[begin - 1]:
            continue
        end = int(later[0])
        level, top = float(lr[begin - 1]), float(lr[begin:end].max())
        yield (
            int(rows[end]),
            _event(
                log,
                "lr_spike",
                rows[[begin, end - 1]],
                (int(rows[begin]), int(rows[end])),
                log.stride,
                height=top - level,
                value=top,
                detail=f"learning rate up to {top:.4g} from {level:.4g}, {top / level:.3g} times that, and back",
            ),
        )


def _groups(at: NDArray[np.intp], gap: int) -> list[NDArray[np.intp]]:
    """Positions split where more than `gap` lies between two."""
    return np.split(at, np.flatnonzero(np.diff(at) > gap) + 1) if at.size else []


def _event(
    log: Log,
    kind: str,
    span: NDArray[np.intp],
    away: tuple[int, int] | None,
    stride: int,
    **known: Any,
) -> Event:
    """`span` holds the first and last row, `away` the rows between which the signal was away; `stride` is its own."""
    first, last = int(span[0]), int(span[1])
    step = int(log.step[first])
    return Event(
        kind=kind,
        step=step,
        length=int(log.step[last]) - step + stride,
        recovery=None if away is None else int(log.step[away[1]] - log.step[away[0]]),
        lr=None if log.lr is None or not math.isfinite(log.lr[first]) else float(log.lr[first]),
        tokens=None if log.tokens is None or not math.isfinite(log.tokens[first]) else int(log.tokens[first]),
        **known,
    )
