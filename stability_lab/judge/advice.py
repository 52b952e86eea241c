"""What to try, by what the log shows: in words of the field, and with this program's keys for its own runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stability_lab.judge.events import LOGIT_ALERT, Event
from stability_lab.judge.log import Log

# Log Z of a sound output layer stays near ln(vocabulary) or below; drifts of so many nats are what a z-loss is for.
LOG_Z_NATS = 20.0


def advice(log: Log, events: Sequence[Event], first_bad: int | None, warmup_steps: int, own: bool) -> str:
    """What to try against a run that diverged or spikes, from its first symptom; `own`: name this program's keys."""

    def key(words: str, keys: str) -> str:
        return f"{words} ({keys})" if own else words

    before = log if first_bad is None else log.rows(log.step <= first_bad)
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
            + ", or a norm at the place whose gradient grows first"
        )
    if first_bad is not None and first_bad <= max(20, warmup_steps):
        return (
            "it happened while the learning rate was warming up: try "
            + key("a longer warm-up", "schedule.warmup_steps")
            + ", "
            + key("a lower learning rate", "optimizer.lr")
            + " or smaller initial weights"
        )
    return (
        "try "
        + key("a lower learning rate", "optimizer.lr")
        + ", "
        + key("a longer warm-up", "schedule.warmup_steps")
        + " or "
        + key("QK-norm", "+stabilizer=qknorm")
    )


def _largest(values: np.ndarray | None) -> float:
    return -math.inf if values is None or np.isnan(values).all() else float(np.nanmax(values))
