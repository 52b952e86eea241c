"""What a run has measured so far, and what is made of it: the log that the judge reads, and the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stability_lab.diagnostics.probe import perplexity
from stability_lab.judge.judge import judge
from stability_lab.judge.log import Log
from stability_lab.judge.verdict import Evidence

Row = dict[str, Any]
LAST = 20  # steps that the final training loss is the mean of
SERIES = {
    "step": "step",
    "loss": "train/loss",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "tokens": "tokens",
    "skipped": "optim/skipped",
    "max_attn_logit": "attn/max_logit",
    "clip_coef": "optim/clip_coef",
}


class History:
    """Series of up to `max_steps` steps, and the newest, first and best measurements."""

    def __init__(self, max_steps: int):
        self._series = {name: np.full(min(max_steps, 4096), math.nan) for name in SERIES}
        self.n = 0
        self.tokens_per_s: list[float] = []
        self.initial: Row = {}
        self.measured: Row = {}  # the newest validation and probe values after the first step
        self.best: Row = {}

    def add(self, row: Mapping[str, Any]) -> None:
        if self.n == len(self._series["step"]):
            self._series = {name: np.concatenate((x, np.full_like(x, math.nan))) for name, x in self._series.items()}
        for name, key in SERIES.items():
            value = row.get(key)
            self._series[name][self.n] = math.nan if value is None else value
        self.n += 1

    def add_measured(self, measured: Mapping[str, Any]) -> None:
        """Validation and probe values after the newest step, or before the first one."""
        if not self.n:
            self.initial |= measured
        else:
            self.measured |= measured
            self._series["max_attn_logit"][self.n - 1] = measured.get("attn/max_logit", math.nan)
        if measured.get("val/loss", math.inf) < self.best.get("val/loss", math.inf):
            self.best = {key: measured[key] for key in ("val/loss", "val/ppl")} | {"step": self.n}

    def series(self, name: str) -> np.ndarray:
        return self._series[name][: self.n]

    def log(self) -> Log:
        return Log(
            step=self.series("step"),
            loss=self.series("loss"),
            grad_norm=self.series("grad_norm"),
            lr=self.series("lr"),
            tokens=self.series("tokens"),
            skipped=self.series("skipped") > 0,
            max_attn_logit=self.series("max_attn_logit"),
        )

    def max_attn_logit(self) -> float | None:
        """Over all probes of the run; None before the first."""
        seen = [*self.series("max_attn_logit"), self.initial.get("attn/max_logit", math.nan)]
        finite = [value for value in seen if not math.isnan(value)]
        return max(finite) if finite else None


def evidence(
    history: History, final: Mapping[str, Any], unigram_entropy: float | None, vocab_size: int, warmup_steps: int
) -> Evidence:
    return Evidence(
        initial_val_loss=history.initial.get("val/loss"),
        final_val_loss=final.get("val/loss"),
        unigram_entropy=unigram_entropy,
        vocab_size=vocab_size,
        warmup_steps=warmup_steps,
    )


def summarise(
    history: History, nonfinite: bool, unigram_entropy: float | None, vocab_size: int, warmup_steps: int
) -> dict[str, Any]:
    """Verdict, final and best values, spike scores and events of a run; `nonfinite`: it was stopped by such a step."""
    log = history.log()
    # Weights before a non-finite step say nothing about the run that it ended.
    final = {} if nonfinite else dict(history.measured)
    judged: dict[str, Any] = {
        "verdict": None,
        "reason": "The run ended before its first step.",
        "scores": {},
        "events": [],
    }
    if history.n:
        judged = judge(log, evidence(history, final, unigram_entropy, vocab_size, warmup_steps)).as_dict()
    kept = log.kept()
    assert kept.loss is not None
    assert kept.grad_norm is not None
    norm = kept.grad_norm[np.isfinite(kept.grad_norm)]
    last_loss = float(kept.loss[-LAST:].mean()) if len(kept) else None
    rates = history.tokens_per_s[1:] or history.tokens_per_s  # the first flush holds warm-up and compilation
    return {
        **judged,
        "steps": history.n,
        "tokens": int(history.series("tokens")[-1]) if history.n else 0,
        "initial": history.initial,
        "final": {
            "train/loss": last_loss,
            "train/ppl": None if last_loss is None else perplexity(last_loss),
            **final,
        },
        "best": history.best,
        "max_attn_logit": history.max_attn_logit(),
        "grad_norm": {f"p{q}": float(np.percentile(norm, q)) if len(norm) else None for q in (50, 90, 99)},
        "clip_fraction": float(np.mean(history.series("clip_coef") < 1)) if history.n else None,
        "skipped_steps": int((history.series("skipped") > 0).sum()),
        "tokens_per_s": float(np.median(rates)) if rates else None,
    }
