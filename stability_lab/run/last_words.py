"""What a run says at its end, in words for a person and in numbers for its mirror."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability_lab.judge.series import perplexity_in
from stability_lab.judge.watch import LAST
from stability_lab.text import aligned, rough
from stability_lab.tracking.tracker import Tracker


def last_words(summary: Mapping[str, Any], path: Path, tracker: Tracker | None) -> str:
    final, initial, steps = summary["final"], summary["initial"], summary["steps"]
    lines = {
        "status": f"{summary['status']} (exit code {summary['exit_code']})",
        "verdict": f"{summary['verdict'] or 'none'}: {summary['reason']}",
        "train": f"{_loss({}, final, 'train')} (mean of the last {min(LAST, steps)} of {steps} steps)",
        "validation": _loss(initial, final, "val"),
        **_optimum(summary),
        "grad-norm spikes": _spikes(summary),
        "largest attention logit": f"{_number(summary['max_attn_logit'], '.4g')} on the probe batch",
        "speed": f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s",
        "files": str(path),
        "W&B": tracker.hint if tracker is not None else "not started",
    }
    return "\n".join(aligned(lines.items()))


def _optimum(summary: Mapping[str, Any]) -> dict[str, str]:
    """The best possible loss; only where the source of the data is known."""
    optimum, loss = summary.get("optimal_loss"), summary["final"].get("val/loss")
    if optimum is None:
        return {}
    distance = "not measured" if loss is None else f"{loss - optimum:.4f} above it"
    return {"best possible": f"loss {optimum:.4f} on these validation tokens; this run is {distance}"}


def _spikes(summary: Mapping[str, Any]) -> str:
    """The judge's events, of which the verdict speaks, and beside them the score by OLMo-core's rule, which is another
    definition of a spike; by the robust one where the run is too short for that."""
    count = summary["events"].get("grad_norm_spike", 0)
    events = "1 event" if count == 1 else f"{count} events"
    scores = summary["scores"].get("grad_norm", {})
    for name in ("olmo_core", "robust"):
        score = scores.get(name)
        if score is not None and score["score"] is not None:
            return (
                f"{events}; by another rule, {name}: {score['n_spikes']} in {score['n_scored']} scored steps "
                f"({score['score']:.2f}%, one spike is {score['resolution']:.2f}%)"
            )
    return f"{events}; not scored: {scores['robust']['reason']}" if scores else f"{events}; not scored"


def _loss(first: Mapping[str, Any], last: Mapping[str, Any], split: str) -> str:
    """`loss 5.554 -> 1.769, perplexity 258 -> 5.87`; without what is not in `first`."""
    ends = [values for values in (first, last) if values.get(f"{split}/loss") is not None]
    if not ends:
        return "not measured"
    losses = " -> ".join(f"{values[f'{split}/loss']:.3f}" for values in ends)
    named, words = perplexity_in(ends[-1], split)
    return f"loss {losses}, {words} {' -> '.join(rough(values[named]) for values in ends)}"


def _number(value: float | None, spec: str) -> str:
    return "not measured" if value is None else format(value, spec)
