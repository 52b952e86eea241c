"""The whole judgement on a log: verdict, spike scores, events, and what one must know to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.divergence import losses_of
from stability_lab.judge.events import NAMES, Event, find_events, unexplained
from stability_lab.judge.log import Log
from stability_lab.judge.spikes import SpikeScore, spike_scores
from stability_lab.judge.verdict import NO_EVIDENCE, Evidence, Verdict, decide, initial_loss_warning

# An initial loss and the first losses of a log further apart are of two runs.
UNLIKE_NATS = 3.0


@dataclass(frozen=True, eq=False)
class Judgement:
    """`scores` by signal (`loss`, `grad_norm`) and definition.

    Their indices are positions in the signal's entry of `steps`: those that have a value of it and were not skipped.
    """

    verdict: Verdict
    scores: Mapping[str, Mapping[str, SpikeScore]]
    events: list[Event]
    notes: list[str]
    steps: Mapping[str, NDArray[np.int64]]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; undefined values are None, and a NaN is a value that was logged."""
        return {
            **asdict(self.verdict),
            "scores": {
                signal: {name: score.as_dict(self.steps[signal]) for name, score in scores.items()}
                for signal, scores in self.scores.items()
            },
            "events": [event.as_dict() for event in self.events],
            "notes": list(self.notes),
        }


def judge(log: Log, evidence: Evidence = NO_EVIDENCE) -> Judgement:
    """Judge a run by its log. Raises `ValueError` for a log without a row."""
    return judged(log, evidence, find_events(log))


def judged(log: Log, evidence: Evidence, events: Sequence[Event]) -> Judgement:
    """`judge`, given the events of the log."""
    kept = log.kept()
    parts = {signal: kept.having(signal) for signal in kept.signals}
    return Judgement(
        verdict=decide(log, evidence, events),
        scores={signal: spike_scores(part.signals[signal]) for signal, part in parts.items()},
        events=unexplained(events, log.stride),
        notes=list(_notes(log, kept, evidence)),
        steps={signal: part.step for signal, part in parts.items()},
    )


def _notes(log: Log, kept: Log, evidence: Evidence) -> list[str]:
    notes = []
    warning = initial_loss_warning(evidence.initial_val_loss, evidence.vocab_size, evidence.unigram_entropy)
    if warning:
        notes.append(warning)
    notes += _strides(log)
    if len(log) and log.step[0] > log.stride:
        notes.append(f"The log begins at step {log.step[0]}: what came before is not judged.")
    if len(kept) < len(log):
        notes.append(f"{len(log) - len(kept)} of {len(log)} steps were skipped and are left out of verdict and scores.")
    losses = losses_of(kept)
    if losses.n and losses.begins and evidence.initial_val_loss is not None:
        if abs(losses.begin - evidence.initial_val_loss) > UNLIKE_NATS:
            notes.append(
                f"The log begins at {losses.begin:.3f} nats, far from the initial loss of "
                f"{evidence.initial_val_loss:.3f}: one of the two is of another run."
            )
    elif losses.n and losses.begins:
        warning = initial_loss_warning(losses.begin, evidence.vocab_size)
        notes += [warning.replace("before training is", "at the start of the log is")] if warning else []
    if losses.n and losses.value.min() < 0:
        notes.append("A cross-entropy cannot be negative: this loss holds something else.")
    if log.grad_norm is not None and np.nanmin(log.grad_norm, initial=0.0) < 0:
        notes.append("A norm cannot be negative: this gradient norm holds something else.")
    if log.loss is None:
        notes.append("The log has no loss: learning and finite divergence are not judged.")
    if log.grad_norm is None:
        notes.append("The log has no gradient norm: only the loss is judged.")
    elif log.skipped is None:
        bad = np.flatnonzero(log.nonfinite("grad_norm"))
        if bad.size and np.isfinite(log.grad_norm[bad[-1] + 1 :]).any():
            notes.append(
                f"The gradient norm was finite again after step {log.step[bad[-1]]}, and the log does not say which "
                "steps were skipped: if fp16 loss scaling skipped these steps, the run did not diverge there."
            )
    return notes


def _strides(log: Log) -> Iterator[str]:
    """Notes about steps without a value, for each signal where the signals differ."""
    # A step that was skipped needs no value: its own note speaks of it.
    skipped = np.zeros(len(log), dtype=np.bool_) if log.skipped is None else log.skipped
    known = {signal: log.has(signal) | skipped for signal in log.signals}
    parts = {signal: log if rows.all() else log.rows(rows) for signal, rows in known.items()}
    several = any(part is not log for part in parts.values())
    for signal, part in parts.items() if several else [("", log)]:
        which = f"{NAMES[signal]}: " if several else ""
        if several and len(part) < len(log):
            yield f"{which}{len(log) - len(part)} of {len(log)} steps have no value, and windows count those that do."
        if part.stride != 1:
            yield (
                f"{which}One value every {part.stride} steps: windows count values, not steps, so scores do not "
                "compare with those of a log of every step, and a spike between two values is not seen."
            )
        gaps = np.diff(part.step)
        if np.any(gaps != part.stride):
            word, at = ("widest", int(gaps.argmax())) if gaps.max() > part.stride else ("narrowest", int(gaps.argmin()))
            yield (
                f"{which}The steps between values are not always {part.stride}: the {word} gap is from "
                f"{part.step[at]:,} to {part.step[at + 1]:,}."
            )
