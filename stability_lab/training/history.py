"""What a run has measured so far, and what is made of it: the log that the judge reads, and the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.judgement import judge
from stability_lab.judge.log import Log
from stability_lab.judge.series import Series, summary
from stability_lab.judge.verdict import Evidence

Row = dict[str, Any]
_CLIP = "optim/clip_coef"


class History:
    """The series of all steps so far, and the newest, first and best measurements."""

    def __init__(self) -> None:
        self.series = Series(more=(_CLIP,))
        self.tokens_per_s: list[float] = []
        self.initial: Row = {}
        self.measured: Row = {}  # the newest validation and probe values after the first step
        self.best: Row = {}

    @property
    def n(self) -> int:
        """Steps, the one that was not finite among them."""
        return len(self.series)

    def add(self, row: Mapping[str, Any]) -> None:
        self.series.add(row)

    def add_measured(self, measured: Mapping[str, Any]) -> bool:
        """Validation and probe values after the newest step, or before the first one; True for the best loss so far."""
        if not self.n:
            self.initial |= measured
        else:
            self.measured |= measured
            self.series.set_newest("attn/max_logit", measured.get("attn/max_logit", math.nan))
        is_best = measured.get("val/loss", math.inf) < self.best.get("val/loss", math.inf)
        if is_best:
            self.best = {key: measured[key] for key in ("val/loss", "val/ppl")} | {"step": self.n}
        return is_best

    def log(self) -> Log:
        return self.series.log()

    def state(self) -> tuple[dict[str, NDArray[np.float64]], dict[str, Any]]:
        """Everything, as arrays and as plain values."""
        names = ("tokens_per_s", "initial", "measured", "best")
        return self.series.columns(), {name: getattr(self, name) for name in names}

    def load_state(self, columns: Mapping[str, NDArray[np.float64]], plain: Mapping[str, Any]) -> None:
        """The opposite of `state`; ValueError or KeyError for anything else."""
        self.series.restore(columns)
        self.tokens_per_s = [float(rate) for rate in plain["tokens_per_s"]]
        self.initial, self.measured, self.best = (dict(plain[name]) for name in ("initial", "measured", "best"))


def summarise(
    history: History, nonfinite: bool, unigram_entropy: float | None, vocab_size: int, warmup_steps: int
) -> dict[str, Any]:
    """Verdict, final and best values, spike scores and events of a run; `nonfinite`: it was stopped by such a step."""
    log = history.log()
    # Weights before a non-finite step say nothing about the run that it ended.
    final = {} if nonfinite else history.measured
    evidence = Evidence(
        initial_val_loss=history.initial.get("val/loss"),
        final_val_loss=final.get("val/loss"),
        unigram_entropy=unigram_entropy,
        vocab_size=vocab_size,
        warmup_steps=warmup_steps,
    )
    judgement = judge(log, evidence) if history.n else None
    rates = history.tokens_per_s[1:] or history.tokens_per_s  # the first flush holds warm-up and compilation
    return {
        **summary(log, judgement, history.initial, final, history.best),
        "clip_fraction": float(np.mean(history.series.column(_CLIP) < 1)) if history.n else None,
        "tokens_per_s": float(np.median(rates)) if rates else None,
    }
