"""A run as the judge follows it while it trains: what was measured so far, and when the judge looks at it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.events import Event, find_events
from stability_lab.judge.judgement import Judgement, judge
from stability_lab.judge.log import Log
from stability_lab.judge.series import Row, Series, perplexity
from stability_lab.judge.verdict import Evidence, diverged_at

LAST = 20  # steps that the final training loss is the mean of
_PLAIN = ("initial", "newest", "best", "measured_at", "looked_at")


class Watch:
    """Rows of numbers on their way to the judge, and validation and probe values, whoever trains the run.

    The judge looks when the log has grown by a hundredth since it last did. So a long run pays for about a hundred
    passes over its log, and a look falls on the same step whether the run was resumed or not, and however long it is
    to be. Which events there are does not depend on the looks, but only on the log.
    """

    def __init__(self, evidence: Evidence, more: tuple[str, ...] = (), perplexity_name: str = "ppl"):
        self.evidence, self.perplexity_name = evidence, perplexity_name
        self.series = Series(more)
        self.initial: Row = {}  # measured before the first step
        self.newest: Row = {}  # measured after it
        self.best: Row = {}  # of the lowest validation loss
        self.measured_at = 0  # the step of `newest`
        self.looked_at = 0  # rows whose events are known

    @property
    def n(self) -> int:
        """Rows, those of skipped and bad steps among them."""
        return len(self.series)

    @property
    def due(self) -> bool:
        return self.n - self.looked_at >= max(1, self.looked_at // 100)

    def log(self) -> Log:
        return self.series.log()

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows in the order of their steps; a row of the newest step replaces it."""
        for row in rows:
            self.series.add(row)

    def measure(self, step: int, values: Mapping[str, Any]) -> bool:
        """Take what was measured after `step`, 0 for before the first one; True for the best validation loss so far."""
        if step == 0:
            self.initial |= values
        elif step >= self.measured_at:
            self.newest |= values
            self.measured_at = step
        is_best = values.get("val/loss", math.inf) < self.best.get("val/loss", math.inf)
        if is_best:
            self.best = {key: values[key] for key in ("val/loss", f"val/{self.perplexity_name}")} | {"step": step}
        return is_best

    def sees_divergence(self) -> bool:
        """Whether a look is due and finds a finite divergence."""
        return self.due and diverged_at(self.log(), self.evidence.warmup_steps) is not None

    def look(self, *, ends: bool = False) -> list[Event]:
        """The events that show themselves since the last look, if one is due or the run ends."""
        if not (self.due or ends):
            return []
        events, self.looked_at = find_events(self.log(), start=self.looked_at), self.n
        return events

    def events_so_far(self) -> list[Event]:
        """The events that looks have found by now, with length and recovery as known at the last one."""
        return find_events(self.log().rows(slice(self.looked_at)))

    def judge(self, *, nonfinite: bool = False, nonfinite_parameter: bool = False) -> tuple[Judgement | None, Row]:
        """The judgement, None before the first step, and what summary.json says of the run.

        `nonfinite`: a step that is not finite ended the run, and weights before it say nothing about it.
        """
        log, final = self.log(), {} if nonfinite else self.newest
        judgement, judged = None, {"verdict": None, "reason": "The run ended before its first step.", "scores": {}}
        if len(log):
            losses = {"initial_val_loss": self.initial.get("val/loss"), "final_val_loss": final.get("val/loss")}
            judgement = judge(log, replace(self.evidence, **losses, nonfinite_parameter=nonfinite_parameter))
            judged = judgement.as_dict()
        counts = Counter(event["event"] for event in judged.get("events", ()))
        kept = log.kept()
        assert kept.loss is not None
        with np.errstate(over="ignore"):
            loss = float(kept.loss[-LAST:].mean()) if len(kept) else None
        ppl = None if loss is None else perplexity(loss)
        norm = _finite(kept.grad_norm)
        tokens = _finite(log.tokens)
        logits = [] if log.max_attn_logit is None else log.max_attn_logit.tolist()
        seen = [x for x in (*logits, self.initial.get("attn/max_logit", math.nan)) if not math.isnan(x)]
        return judgement, {
            **judged,
            "events": dict(counts),
            "steps": int(log.step[-1]) if len(log) else 0,
            "tokens": int(tokens[-1]) if len(tokens) else 0,
            "initial": dict(self.initial),
            "final": {"train/loss": loss, f"train/{self.perplexity_name}": ppl, **final},
            "best": dict(self.best),
            "max_attn_logit": max(seen) if seen else None,
            "grad_norm": {f"p{q}": float(np.percentile(norm, q)) if len(norm) else None for q in (50, 90, 99)},
            "skipped_steps": len(log) - len(kept),
        }

    def state(self) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Everything, as arrays and as plain values."""
        return self.series.columns(), {name: getattr(self, name) for name in _PLAIN}

    def load_state(self, columns: Mapping[str, NDArray[np.float64]], plain: Mapping[str, Any]) -> None:
        """The opposite of `state`; ValueError, KeyError or TypeError for anything else."""
        self.series.restore(columns)
        self.initial, self.newest, self.best = (dict(plain[name]) for name in _PLAIN[:3])
        self.measured_at, self.looked_at = (int(plain[name]) for name in _PLAIN[3:])


def without_verdict(summary: Row) -> Row:
    """The summary of a run that failed: what was measured, and no verdict on a part that was not meant to be all."""
    kept = {key: value for key, value in summary.items() if key != "sensitivity"}
    return kept | {"verdict": None, "reason": "The run failed, and what it measured until then has no verdict."}


def _finite(values: NDArray[np.float64] | None) -> NDArray[np.float64]:
    return np.empty(0) if values is None else values[np.isfinite(values)]
