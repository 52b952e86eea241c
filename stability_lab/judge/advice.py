"""What to try, by what the log shows: in words of the field, and with this program's keys for its own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stability_lab.judge.events import LOGIT_ALERT, LR_ROWS, SPIKES, Event
from stability_lab.judge.log import Log

# Log Z of a sound output layer stays near ln(vocabulary) or below; drifts of so many nats are what a z-loss is for.
LOG_Z_NATS = 20.0
EARLY_STEPS = 20
# A learning rate is warming up that rose over so many values.
_RISING_ROWS = 5


def advice(log: Log, events: Sequence[Event], first_bad: int | None, warmup_steps: int, own: bool) -> str:
    """What to try against a run that diverged or spikes, from its first symptom; `own`: name this program's keys."""

    def key(words: str, keys: str) -> str:
        return f"{words} ({keys})" if own else words

    before = log if first_bad is None else log.rows(log.step <= first_bad)
    jumps = [event for event in events if event.kind == "lr_spike"]
    hurt = [event.step for event in events if event.kind in SPIKES] if first_bad is None else [first_bad]
    if jumps and any(0 <= step - jumps[0].step <= jumps[0].length + LR_ROWS for step in hurt):
        return (
            f"the learning rate jumped at step {jumps[0].step} and came back: look at the schedule before anything else"
        )
    logit = _largest(before.max_attn_logit)
    if logit > LOGIT_ALERT:
        return (
            f"the largest attention logit reached {logit:.4g}: try "
            + key("QK-norm", "+stabilizer=qknorm")
            + " or a lower learning rate"
        )
    log_z = _largest(None if before.log_z is None else np.abs(before.log_z))
    if log_z > LOG_Z_NATS:
        return f"the mean of log Z reached {log_z:.3g} nats: try " + key("a z-loss", "+stabilizer=zloss")
    slow = [event for event in events if event.kind == "slow_rise" and event.signal == "grad_norm"]
    if slow and (first_bad is None or slow[0].step < first_bad):
        return (
            f"the gradient norm had been rising since step {slow[0].step}: try "
            + key("a lower learning rate", "optimizer.lr")
            + ", and look whose gradient grows first"
        )
    if first_bad is not None and (when := _early(before, warmup_steps)):
        return (
            f"it happened {when}: try "
            + key("a longer warm-up", "schedule.warmup_steps")
            + ", "
            + key("a lower learning rate", "optimizer.lr")
            + " or smaller initial weights"
        )
    brief = all(event.recovery is not None and event.recovery <= log.stride for event in events)
    if first_bad is None and brief and all(event.kind in SPIKES for event in events):
        return "each of them is back with the next value, as with single batches: look at the data of these steps"
    lower = "try " + key("a lower learning rate", "optimizer.lr") + " or tighter gradient clipping"
    return lower if log.max_attn_logit is not None else f"{lower}, and log the largest attention logit"


def _early(before: Log, warmup_steps: int) -> str | None:
    """When a fault happened, if that was while the learning rate was rising, or within the first steps."""
    lr = before.lr
    if lr is not None and np.isfinite(lr).all() and len(before) > _RISING_ROWS:
        warms_up = (np.diff(lr[-_RISING_ROWS:]) > 0).all()
    else:
        warms_up = 0 < warmup_steps >= before.step[-1]
    if warms_up:
        return "while the learning rate was warming up"
    return "within the first 20 steps" if before.step[-1] <= EARLY_STEPS else None


def _largest(values: np.ndarray | None) -> float:
    return -math.inf if values is None or np.isnan(values).all() else float(np.nanmax(values))
