"""The verdict on a run in one word, with a sentence that says why and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.advice import advice
from stability_lab.judge.divergence import (
    ABOVE_NATS,
    END_ROWS,
    LOST_NATS,
    MARGIN_NATS,
    RISE_NATS,
    RISES,
    RISING_NATS,
    SURE,
    Losses,
    ended_above,
    left,
    losses_of,
    lost_all,
    rises_at_end,
    rose,
)
from stability_lab.judge.events import DRIFTS, NAMES, STANDSTILLS, Event, find_events, unexplained
from stability_lab.judge.log import Log
from stability_lab.judge.rates import ALL_LIMIT, BRIEF, LASTING_LIMIT, SLOW, Spikes, is_tall, spikes_of

VerdictName = Literal["diverged", "no_learning", "spiky", "stable", "undecided"]

# Fewer values decide nothing but that a run is lost.
MIN_VALUES = 2 * END_ROWS
# A running run is not stopped before.
MIN_STEPS = 100
# How far above ln(vocabulary) the loss at initialisation may be, and how far below.
INITIAL_ABOVE, INITIAL_BELOW = 1.0, 0.5


@dataclass(frozen=True)
class Evidence:
    """What the judge cannot see in the log; losses and the entropy in nats per token, None where unknown.

    `own`: the run is one of this program, so that advice names its keys, and its data do not change on the way.
    """

    initial_val_loss: float | None = None
    final_val_loss: float | None = None
    unigram_entropy: float | None = None
    vocab_size: int | None = None
    warmup_steps: int = 0
    nonfinite_parameter: bool = False
    own: bool = False

    def chance(self) -> tuple[float, str] | None:
        """The loss of a model that has learned nothing but how frequent tokens are, and what it is; None if unknown."""
        if self.unigram_entropy is not None:
            return self.unigram_entropy, "the entropy of single tokens"
        initial = self.initial_val_loss
        if self.vocab_size is not None and (initial is None or initial > math.log(self.vocab_size)):
            return math.log(self.vocab_size), f"ln({self.vocab_size})"
        return None if initial is None or not math.isfinite(initial) else (initial, "the initial loss")

    def begin(self, losses: Losses) -> tuple[float, str] | None:
        """The loss with which the run began, and what it is; None if unknown."""
        if self.initial_val_loss is not None and math.isfinite(self.initial_val_loss):
            return self.initial_val_loss, "the initial loss"
        if losses.begins and losses.n:
            return losses.begin, "the first losses"
        if self.vocab_size is not None:
            return math.log(self.vocab_size), f"ln({self.vocab_size})"
        return None


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

    - `diverged`: a loss, a gradient norm or a parameter is not finite at the end; or the loss ends over 0.5 nats above
      where it began, or back there after a fall, or over 1 nat above its lowest level.
    - `undecided`: fewer than 40 values, or gradient norms of exactly 0.
    - `no_learning`: neither the mean training loss nor the final validation loss ever was more than 0.05 nats below the
      unigram entropy (without one, below the loss at the begin).
    - `spiky`: more spikes than healthy runs have, or one from which the run recovered slowly (`rates`).
    - `undecided`: the log ends within a spike, or after a rise that is not over.
    - `stable`: none of these.

    Raises `ValueError` for a log without a row.
    """
    return decide(log, evidence, find_events(log))


def decide(log: Log, evidence: Evidence, events: Sequence[Event]) -> Verdict:
    """`verdict`, given the events of the log."""
    if not len(log):
        raise ValueError("the log has no step")
    kept, events = log.kept(), unexplained(events, log.stride)
    losses = losses_of(kept, () if evidence.own else events)
    judged = {delta: _decide(log, kept, losses, evidence, events, delta) for delta in {RISE_NATS, *RISES}}
    return replace(judged[RISE_NATS], sensitivity={f"{delta:g}": judged[delta].verdict for delta in RISES})


def diverged_at(log: Log, warmup_steps: int = 0) -> int | None:
    """First step of a finite divergence of a running run, or None: it may ask at every flush.

    The rule is that of the verdict on a loss that rose, from 100 steps and past the warm-up on: before, a loss may rise
    and fall again.
    """
    log = log.kept()
    if not len(log) or log.step[-1] < MIN_STEPS or log.step[-1] <= warmup_steps:
        return None
    # Events cost a pass over the log, and most runs need none to be told from a change of their data.
    if rose(losses_of(log)) is None:
        return None
    return rose(losses_of(log, find_events(log)))


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


def _decide(log: Log, kept: Log, losses: Losses, evidence: Evidence, events: Sequence[Event], delta: float) -> Verdict:
    if not len(kept):
        return Verdict("undecided", f"All {len(log)} steps were skipped: there is nothing to judge.")
    bad = _nonfinite(kept, evidence) or _finite_divergence(losses, evidence, delta)
    if bad:
        step, why = bad
        row = min(int(np.searchsorted(log.step, step)), len(log) - 1)
        what = advice(kept, events, step, evidence.warmup_steps, evidence.own)
        return Verdict("diverged", f"{why}; {what}.", step, _number(log.lr, row), _whole(log.tokens, row))
    return _too_little(log, kept) or _stuck(losses, evidence) or _calm(kept, losses, evidence, events)


def _nonfinite(log: Log, evidence: Evidence) -> tuple[int, str] | None:
    """A run is lost whose last values are not finite. One that is finite again was saved, or skipped steps unsaid."""
    bad = {name: log.nonfinite(name) for name in ("loss", "grad_norm") if name in log.signals}
    lost = np.any(list(bad.values()), axis=0)
    # fp16 loss scaling skips single steps with such a gradient norm, and foreign logs seldom say so.
    only_norm = "loss" in bad and not bad["loss"][-END_ROWS:].any() and lost[-3:].sum() < 3 and not evidence.own
    if (lost[-1] and not only_norm) or lost[-END_ROWS:].mean() > 0.5:
        # Finite values between bad ones are no recovery: from the last END_ROWS good ones in a row on.
        good = np.flatnonzero(np.convolve(~lost, np.ones(END_ROWS), "valid") == END_ROWS) + END_ROWS
        row = int(np.flatnonzero(lost[good[-1] :])[0] + good[-1]) if good.size else int(np.flatnonzero(lost)[0])
        name = next(name for name, which in bad.items() if which[row])
        return int(log.step[row]), f"The {NAMES[name]} is {log.signals[name][row]} at step {log.step[row]}"
    last = int(log.step[-1])
    if evidence.final_val_loss is not None and not math.isfinite(evidence.final_val_loss):
        return last, f"The validation loss is {evidence.final_val_loss} after step {last}"
    if evidence.nonfinite_parameter:
        return last, f"A parameter is not finite after step {last}"
    return None


def _finite_divergence(losses: Losses, evidence: Evidence, delta: float) -> tuple[int, str] | None:
    if losses.n < END_ROWS // 2:
        return None
    peaked = f"with a peak of {_nats(losses.value[losses.peak])} at step {losses.step[losses.peak]}"
    begin, final, bad = evidence.begin(losses), evidence.final_val_loss, rose(losses, delta)
    if begin is not None:
        level, name = begin
        above = evidence.initial_val_loss is not None and final is not None and final > level + ABOVE_NATS
        if above or ended_above(losses, level):
            last = float(losses.value[-1])
            what, value = ("validation loss", final) if above and final is not None else ("loss", max(losses.end, last))
            step = left(losses, level + MARGIN_NATS, level + ABOVE_NATS) if bad is None else bad
            return step, f"The {what} ended at {_nats(value)} nats, above {name} of {level:.3f}, {peaked}"
    if bad is not None:
        means = losses.level()
        lowest = int(means.argmin())
        return bad, (
            f"The loss rose from a mean of {means[lowest]:.3f} at step {losses.step[lowest + losses.width - 1]} to a "
            f"median of {_nats(losses.end)} nats in the last {END_ROWS} values, more than {delta:g} above, {peaked}, "
            f"and left its level at step {bad}"
        )
    if begin is None:
        return None
    level, name = begin
    lowest = float(losses.level().min())
    # What a validation says of the end is surer than twenty noisy losses.
    back = lowest < level - LOST_NATS and final is not None and final > level - MARGIN_NATS
    if lost_all(losses, level) or (back and evidence.initial_val_loss is not None):
        what, value = ("validation loss", final) if back else ("loss", losses.end)
        return left(losses, (lowest + level) / 2, level - MARGIN_NATS), (
            f"The {what} of {value:.3f} nats at the end is back at {name} of {level:.3f}, though the loss had been "
            f"{lowest:.3f}"
        )
    return None


def _too_little(whole: Log, log: Log) -> Verdict | None:
    """`log` is the whole one without skipped steps."""
    skipped = len(whole) - len(log)
    if whole.skipped is not None and (skipped > len(whole) / 2 or whole.skipped[-END_ROWS:].all()):
        what = f"{skipped:,} of {len(whole):,} steps were skipped"
        return Verdict("undecided", f"{what}, to the end or most of all: what is left says little of the run.")
    values = max(int(np.count_nonzero(np.isfinite(x))) for x in log.signals.values())
    if values < MIN_VALUES:
        first = "The loss" if log.loss is not None else "The gradient norm"
        many = "one value is" if values == 1 else f"{values} values are"
        return Verdict("undecided", f"{first} stayed finite, but {many} too few: a verdict needs {MIN_VALUES}.")
    norm = log.grad_norm
    if norm is not None and np.count_nonzero(norm == 0) > len(log) / 2:
        return Verdict(
            "undecided",
            f"The gradient norm is exactly 0 in {np.count_nonzero(norm == 0)} of {len(log)} values: nothing was "
            "trained, or the norm was logged after it was cleared.",
        )
    return None


def _stuck(losses: Losses, evidence: Evidence) -> Verdict | None:
    if not losses.n:
        return None
    level, unsure = losses.tenths()
    chance = evidence.chance()
    if chance is None and losses.begins:
        # A tenth of a long log is a rough reference, and so are five noisy values.
        chance = max(float(level[0]), losses.begin - SURE * losses.noise), "the first losses"
    if chance is None:
        return None
    reference, name = chance
    margin = max(MARGIN_NATS, unsure)
    if reference <= margin and losses.frozen < losses.n:
        return None  # such a loss has no cross-entropy's scale, and cannot fall by the margin
    seen = min([float(level.min())] + ([] if evidence.final_val_loss is None else [evidence.final_val_loss]))
    if seen < reference - margin:
        return None
    rate = "optimizer.lr" if evidence.own else "learning rate"
    began = evidence.begin(losses)
    ends = losses.end if evidence.final_val_loss is None else evidence.final_val_loss
    rose = began is not None and ends > began[0] + MARGIN_NATS
    steps = "trainer.max_steps" if evidence.own else "steps"
    what = f"try a lower {rate}" if rose else f"try another {rate}, or more {steps}"
    if losses.frozen == losses.n:
        return Verdict(
            "no_learning",
            f"The loss is exactly {losses.value[-1]:g} throughout; look whether anything is trained: frozen weights, a "
            "learning rate of 0, the same loss logged again.",
        )
    return Verdict(
        "no_learning",
        f"The lowest level of the loss is {_nats(seen)} nats, which is not {margin:.2g} below {name} of "
        f"{reference:.3f}; {what}.",
    )


def _calm(log: Log, losses: Losses, evidence: Evidence, events: Sequence[Event]) -> Verdict:
    spikes = spikes_of(log, events)
    course = _course(losses_of(log), finite=not spikes.lost)
    drifts = [event for event in events if event.kind in DRIFTS]
    drift = f", and with a {_drift(drifts[0])}" if drifts else ""
    if spikes.sick:
        own = [event for event in events if event.cause is None]
        what = advice(log, own, None, evidence.warmup_steps, evidence.own)
        return Verdict("spiky", f"{course}, but with {_spiky(spikes)}{drift}; {what}.")
    if spikes.open is not None:
        where = f"at step {spikes.open.step}: {spikes.open.detail}"
        return Verdict("undecided", f"{course}, but is not back from a spike {where}.")
    unrecovered = [event for event in drifts if event.recovery is None and event.cause is None]
    high = losses.n > 0 and losses.end > float(losses.level().min()) + RISING_NATS + SURE * losses.noise
    open_drifts = [event for event in unrecovered if is_tall(event) or (high and event.signal == "loss")]
    if open_drifts:
        return Verdict("undecided", f"{course}, but is not back from a {_drift(open_drifts[0])}.")
    if losses.n and losses.frozen >= max(MIN_VALUES, losses.n // 10):
        return Verdict(
            "undecided",
            f"{course}, but the last {losses.frozen:,} losses are exactly {losses.value[-1]:g}: look whether anything "
            "is trained, and what is logged.",
        )
    if rises_at_end(losses):
        return Verdict("undecided", f"{course}, but it was rising at the end, to a median of {_nats(losses.end)}.")
    still = [event for event in events if event.kind in STANDSTILLS]
    if still and still[-1].kind == "zero_gradient" and still[-1].recovery is None:
        return Verdict("undecided", f"{course}, but from step {still[-1].step:,} on {still[-1].detail}.")
    alerts = [event.value for event in events if event.kind == "attention_logit_alert" and event.value is not None]
    buts = [f"the largest attention logit reached {max(alerts):.4g}"] if alerts else []
    buts += [f"from step {event.step:,} on {event.detail}" for event in still[:1]]
    buts += [f"at step {event.step:,}: {event.detail}" for event in events if event.kind == "lr_spike"][:1]
    return Verdict("stable", f"{course}, {_few(spikes)}{drift}{''.join(f'; but {but}' for but in buts)}.")


def _drift(event: Event) -> str:
    return f"{event.kind.replace('_', ' ')} at step {event.step}: {event.detail}"


def _spiky(spikes: Spikes) -> str:
    """What makes a run spiky."""
    if spikes.lost:
        event = spikes.lost[0]
        return f"a loss that was not finite at step {event.step}: {event.detail}"
    if spikes.slow:
        worst = max(spikes.slow, key=lambda event: event.recovery or 0)
        many = f"{_many(len(spikes.slow), 'spike')} that took over {SLOW} values to recover"
        return f"{many}; the slowest at step {worst.step}, back after {worst.recovery:,} steps: {worst.detail}"
    if spikes.lasting.exceeds(LASTING_LIMIT):
        what, rate, limit = f" that took over {BRIEF} values to recover", spikes.lasting, LASTING_LIMIT
    else:
        what, rate, limit = "", spikes.all, ALL_LIMIT
    where = f" in the most spiky {rate.values:,}" if rate.parts > 1 else ""
    return f"{_many(rate.count, 'spike')}{what}{where}: {rate}, where healthy runs have up to {limit:g}{_first(spikes)}"


def _few(spikes: Spikes) -> str:
    if not spikes.count:
        return "without a spike that it does not share with other runs" if spikes.batches else "without a spike"
    brief = "" if spikes.lasting.count or not spikes.back else f", back within {BRIEF} values"
    rate = f"{spikes.all}, where healthy runs have up to {ALL_LIMIT:g}"
    return f"with {_many(spikes.count, 'spike')}{brief}: {rate}{_first(spikes)}"


def _first(spikes: Spikes) -> str:
    return f"; the first at step {spikes.first.step}: {spikes.first.detail}" if spikes.first else ""


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' if n > 1 else ''}"


def _nats(loss: float) -> str:
    """A loss with three decimals, unless it has exploded."""
    return f"{loss:.3f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def _course(losses: Losses, finite: bool) -> str:
    """What the loss did from the beginning to the end of the log."""
    if not losses.n:
        return "The gradient norm stayed finite"
    first, last, lowest = losses.begin, losses.end, float(losses.level().min())
    if last > lowest + RISING_NATS and first > lowest + MARGIN_NATS:
        course = f"fell from {_nats(first)} to {_nats(lowest)} nats, rose to {_nats(last)}"
    elif abs(last - first) > MARGIN_NATS:
        course = f"{'fell' if last < first else 'rose'} from {_nats(first)} to {_nats(last)} nats"
    else:
        course = f"began and ended at {_nats(last)} nats"
    return f"The loss {course}" + (" and stayed finite" if finite else "")


def _number(values: NDArray[np.float64] | None, row: int) -> float | None:
    return None if values is None or not math.isfinite(values[row]) else float(values[row])


def _whole(values: NDArray[np.float64] | None, row: int) -> int | None:
    value = _number(values, row)
    return None if value is None else int(value)
