"""The verdict on a run in one word, with a sentence that says why and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.events import DRIFTS, LOGIT_ALERT, NAMES, SPIKES, Event, can_spike, find_events
from stability_lab.judge.log import Log

VerdictName = Literal["diverged", "no_learning", "spiky", "stable"]

# How far, in nats, the loss must have risen above its lowest level for a finite run to count as diverged, and the
# other distances for which the verdict is told too.
RISE_NATS = 1.0
RISES = (0.5, 1.0, 2.0)
# A loss less than this below its reference has not left it.
MARGIN_NATS = 0.05
# A shorter run says nothing about finite divergence.
MIN_STEPS = 100
# The level of the loss is a mean over this many rows, or over this part of them where that is more.
LEVEL_ROWS, LEVEL_PART = 20, 0.02
# A loss that ends this far above its lowest level is told to have risen.
ROSE_NATS = 0.25
# How far above ln(vocabulary) the loss at initialisation may be, and how far below.
INITIAL_ABOVE, INITIAL_BELOW = 1.0, 0.5

# Sums of up to 1e5 losses are exact to about this, and a larger loss than the cap means the same as the cap.
_ROUNDING, _CAP = 1e-6, 1e4


@dataclass(frozen=True)
class Evidence:
    """What the judge cannot see in the log; losses and the entropy in nats per token, None where unknown."""

    initial_val_loss: float | None = None
    final_val_loss: float | None = None
    unigram_entropy: float | None = None
    vocab_size: int | None = None
    warmup_steps: int = 0
    nonfinite_parameter: bool = False


NO_EVIDENCE = Evidence()


@dataclass(frozen=True)
class Verdict:
    """`first_bad_step` and what stands with it are None unless the run diverged.

    It is the first step that is not finite, or the one at which the loss left its level for good: where to go back to.

    `delta` is the rise in nats from which a finite run counts as diverged, and `sensitivity` the verdict at others.
    """

    verdict: VerdictName
    reason: str
    first_bad_step: int | None = None
    lr_at_first_bad: float | None = None
    tokens_at_first_bad: int | None = None
    delta: float = RISE_NATS
    sensitivity: dict[str, VerdictName] = field(default_factory=dict)


def verdict(log: Log, evidence: Evidence = NO_EVIDENCE) -> Verdict:
    """Judge a run. Skipped steps are left out. The first of these that holds is the verdict:

    - `diverged`: a loss, a gradient norm or a parameter is not finite; or `diverged_at` finds a step; or, under the
      same conditions, the final validation loss is back within 0.05 nats of the initial one after the training loss
      had been lower.
    - `no_learning`: neither the mean training loss nor the final validation loss ever was more than 0.05 nats
      below the unigram entropy (without one, below the initial validation loss).
    - `spiky`: `find_events` finds a spike of loss or gradient norm. `stable`: none of these.

    Raises `ValueError` for a log without a row.
    """
    return decide(log, evidence, find_events(log))


def decide(log: Log, evidence: Evidence, events: Sequence[Event]) -> Verdict:
    """`verdict`, given the events of the log."""
    if not len(log):
        raise ValueError("the log has no step")
    judged = {delta: _decide(log, evidence, events, delta) for delta in {RISE_NATS, *RISES}}
    return replace(judged[RISE_NATS], sensitivity={f"{delta:g}": judged[delta].verdict for delta in RISES})


def diverged_at(log: Log, warmup_steps: int = 0) -> int | None:
    """First step of a finite divergence, or None: a running run may ask at every flush.

    From 100 steps and past the warm-up on, the mean loss of the last max(20, 2%) rows is more than 1 nat above its
    lowest value; the first bad step is the one at which the loss began to stay above the half of that.
    """
    return _first_bad(*_judged_losses(log.kept(), warmup_steps), RISE_NATS)


def initial_loss_warning(
    initial_val_loss: float | None, vocab_size: int | None, unigram_entropy: float | None = None
) -> str | None:
    """What is strange about the loss before training, or None; a model that knows nothing has about ln(vocabulary)."""
    if initial_val_loss is None:
        return None
    if not math.isfinite(initial_val_loss):
        return f"The loss before training is {initial_val_loss}: the initial model already overflows."
    chance = None if vocab_size is None else math.log(vocab_size)
    if chance is not None and initial_val_loss > chance + INITIAL_ABOVE:
        return (
            f"The loss before training is {initial_val_loss:.3f} nats, far above ln({vocab_size}) = {chance:.3f}: the "
            "initial logits are large; look at the scale of the initial weights and of the output layer."
        )
    if unigram_entropy is not None and initial_val_loss < unigram_entropy - MARGIN_NATS:
        return (
            f"The loss before training is {initial_val_loss:.3f} nats, below the {unigram_entropy:.3f} of single "
            "tokens: the weights are trained ones, or the model sees its targets."
        )
    if chance is not None and initial_val_loss < chance - INITIAL_BELOW:
        return (
            f"The loss before training is {initial_val_loss:.3f} nats, far below ln({vocab_size}) = {chance:.3f}: the "
            "weights are trained ones, the model sees its targets, or the vocabulary is another."
        )
    return None


def _decide(log: Log, evidence: Evidence, events: Sequence[Event], delta: float) -> Verdict:
    kept, advice = log.kept(), _advice(log)
    if not len(kept):
        return Verdict("no_learning", f"All {len(log)} steps were skipped; {advice}.")
    bad = _nonfinite(kept, evidence) or _finite_divergence(kept, evidence, delta)
    if bad:
        step, why = bad
        row = int(np.searchsorted(log.step, step))
        return Verdict("diverged", f"{why}; {advice}.", step, _number(log.lr, row), _whole(log.tokens, row))
    return _stuck(kept, evidence) or _calm(kept, evidence, events, advice)


def _nonfinite(log: Log, evidence: Evidence) -> tuple[int, str] | None:
    bad = {name: log.nonfinite(name) for name in ("loss", "grad_norm") if name in log.signals}
    rows = np.flatnonzero(np.any(list(bad.values()), axis=0))
    if rows.size:
        row = int(rows[0])
        name = next(name for name, which in bad.items() if which[row])
        return int(log.step[row]), f"The {NAMES[name]} is {log.signals[name][row]} at step {log.step[row]}"
    last = int(log.step[-1])
    if evidence.final_val_loss is not None and not math.isfinite(evidence.final_val_loss):
        return last, f"The validation loss is {evidence.final_val_loss} after step {last}"
    if evidence.nonfinite_parameter:
        return last, f"A parameter is not finite after step {last}"
    return None


def _finite_divergence(log: Log, evidence: Evidence, delta: float) -> tuple[int, str] | None:
    steps, losses = _judged_losses(log, evidence.warmup_steps)
    if not losses.size:
        return None
    level = _level(losses)
    width, lowest = losses.size - level.size + 1, int(level.argmin())
    first_bad = _first_bad(steps, losses, delta)
    if first_bad is not None:
        return first_bad, (
            f"The mean loss of {width} values rose from {level[lowest]:.3f} at step {steps[lowest + width - 1]} to "
            f"{level[-1]:.3f} nats, over {delta:g} above, and left its level at step {first_bad}"
        )
    initial, final = evidence.initial_val_loss, evidence.final_val_loss
    if initial is None or final is None:
        return None
    limit = initial - MARGIN_NATS
    # A run that never was lower is no divergence but no_learning.
    if final < limit or level[lowest] >= limit:
        return None
    after = int(np.flatnonzero(level < limit)[-1]) + 1
    back = losses.size - 1 if after == level.size else _left(losses, level, limit, after)
    return int(steps[back]), (
        f"The validation loss of {final:.3f} nats after step {steps[-1]} is back at its initial {initial:.3f}, though "
        f"the training loss had been {level[lowest]:.3f}"
    )


def _judged_losses(log: Log, warmup_steps: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The finite losses and their steps; empty where the run is too short to diverge while finite."""
    steps, losses = _finite_losses(log)
    # Two separate means at least, also where only every k-th step was logged.
    if losses.size < 2 * LEVEL_ROWS or steps[-1] < MIN_STEPS or steps[-1] <= warmup_steps:
        return steps[:0], losses[:0]
    return steps, losses


def _finite_losses(log: Log) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if log.loss is None:
        return log.step[:0], np.empty(0)
    finite = np.isfinite(log.loss)
    return log.step[finite], log.loss[finite]


def _level(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rolling means; the first one ends at the row that is the last of its window."""
    return _rolling_mean(losses, _width(losses.size))


def _width(n: int) -> int:
    return min(n, max(LEVEL_ROWS, math.ceil(LEVEL_PART * n)))


def _rolling_mean(x: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    sums = np.r_[0.0, np.cumsum(np.clip(x, -_CAP, _CAP))]
    return (sums[width:] - sums[:-width]) / width


def _first_bad(steps: NDArray[np.int64], losses: NDArray[np.float64], delta: float) -> int | None:
    if not losses.size:
        return None
    level = _level(losses)
    lowest = float(level.min())
    fine = level <= lowest + delta + _ROUNDING
    if fine[-1]:
        return None
    # The last time it was fine, so that an earlier rise from which the run recovered is not blamed.
    return int(steps[_left(losses, level, lowest + delta / 2, int(np.flatnonzero(fine)[-1]) + 1)])


def _left(losses: NDArray[np.float64], level: NDArray[np.float64], limit: float, after: int) -> int:
    """Row at which the losses left `limit` upwards, given the first of the means, `after`, that is too high.

    A mean lags behind what it is a mean of. So the step is looked for from the window of the last mean within the limit
    on: where the summed distances from the limit are smallest (Page, Biometrika 41, 1954), which one outlier, cut at
    what lies below the limit, cannot move far.
    """
    width = losses.size - level.size + 1
    begin, reach = int(np.flatnonzero(level[:after] <= limit)[-1]), max(limit - float(level.min()), MARGIN_NATS)
    # As far again beyond the first mean that is too high, which an outlier shortly before the rise may have made so.
    sums = np.cumsum(np.clip(losses[begin : after + 2 * width] - limit, -reach, reach))
    lowest = int(sums.argmin())
    return begin if sums[lowest] > 0 else min(begin + lowest + 1, losses.size - 1)


def _stuck(log: Log, evidence: Evidence) -> Verdict | None:
    reference = evidence.unigram_entropy if evidence.unigram_entropy is not None else evidence.initial_val_loss
    losses = _finite_losses(log)[1]
    seen = [float(_level(losses).min())] if losses.size else []
    seen += [] if evidence.final_val_loss is None else [evidence.final_val_loss]
    if reference is None or not seen or min(seen) < reference - MARGIN_NATS:
        return None
    name = "initial validation loss" if evidence.unigram_entropy is None else "entropy of single tokens"
    steps = int(log.step[-1])
    long_enough = steps >= MIN_STEPS and steps > evidence.warmup_steps
    advice = (
        "try another optimizer.lr or a larger trainer.max_steps"
        if long_enough
        else f"{steps} steps are few: raise trainer.max_steps"
    )
    return Verdict(
        "no_learning",
        f"The loss got to {min(seen):.3f} nats and never more than {MARGIN_NATS} below the {name} of {reference:.3f}; "
        f"{advice}.",
    )


def _calm(log: Log, evidence: Evidence, events: Sequence[Event], advice: str) -> Verdict:
    what = _course(log, evidence)
    drifts = [event for event in events if event.kind in DRIFTS]
    drift = f"a {drifts[0].kind.replace('_', ' ')} at step {drifts[0].step}: {drifts[0].detail}" if drifts else ""
    spikes = [event for event in events if event.kind in SPIKES]
    if spikes:
        many = len(spikes)
        first = f"the first at step {spikes[0].step}: {spikes[0].detail}"
        drift = drift and f"; and {drift}"
        return Verdict(
            "spiky",
            f"{what}, but with {many} spike{'s' if many > 1 else ''} in {len(log)} values, {first}{drift}; {advice}.",
        )
    drift = drift and f", but with {drift}"
    if not can_spike(log):
        return Verdict("stable", f"{what}{drift}; the run is too short to be tested for spikes.")
    return Verdict("stable", f"{what}, without a spike{drift}.")


def _course(log: Log, evidence: Evidence) -> str:
    """What the loss did from the beginning to the end of the log, whose values are all finite."""
    losses = _finite_losses(log)[1]
    if not losses.size:
        return "The gradient norm stayed finite"
    if losses.size == 1:
        return f"The loss is {losses[0]:.3f} nats in the only value"
    level = _rolling_mean(losses, min(_width(losses.size), losses.size // 2))
    first, last, lowest = float(level[0]), float(level[-1]), float(level.min())
    if last > lowest + ROSE_NATS and first > lowest + MARGIN_NATS:
        course = f"fell from {first:.3f} to {lowest:.3f} nats, rose to {last:.3f}"
    elif abs(last - first) > MARGIN_NATS:
        course = f"{'fell' if last < first else 'rose'} from {first:.3f} to {last:.3f} nats"
    else:
        course = f"began and ended at {last:.3f} nats"
    if last > lowest + RISE_NATS and not _judged_losses(log, evidence.warmup_steps)[0].size:
        course += f" (a finite rise is divergence from {2 * LEVEL_ROWS} values and {MIN_STEPS} steps on, after warm-up)"
    return f"The loss {course} and stayed finite"


def _advice(log: Log) -> str:
    logit = log.max_attn_logit
    largest = -math.inf if logit is None or np.isnan(logit).all() else float(np.nanmax(logit))
    if largest > LOGIT_ALERT:
        return (
            f"the largest attention logit reached {largest:.4g}: try a stabilizer of attention logits such as "
            "+stabilizer=qknorm, or a lower optimizer.lr"
        )
    return "try a lower optimizer.lr, a longer schedule.warmup_steps or a stabilizer such as +stabilizer=qknorm"


def _number(values: NDArray[np.float64] | None, row: int) -> float | None:
    return None if values is None or not math.isfinite(values[row]) else float(values[row])


def _whole(values: NDArray[np.float64] | None, row: int) -> int | None:
    value = _number(values, row)
    return None if value is None else int(value)
