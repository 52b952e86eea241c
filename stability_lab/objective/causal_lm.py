"""Next-token prediction: the target of each position is the id behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stability_lab.config import option
from stability_lab.judge.series import perplexity
from stability_lab.objective.loss import IGNORE, LossSums
from stability_lab.objective.objective import Batch, Traits, Vocabulary, token_loss
from stability_lab.seams import LossTerm, ModelOutput


@dataclass(frozen=True)
class CausalLM:
    """The first `prompt` targets of a sequence are given and not predicted. The sample's number plays no part."""

    name: ClassVar[str] = "causal_lm"
    traits: ClassVar[Traits] = Traits()

    prompt: int = option(0, ge=0)

    def bound(self, vocabulary: Vocabulary | None, seed: int) -> CausalLM:
        return self

    def batch(self, windows_MT1: Tensor, first: int) -> Batch:
        targets_MT = windows_MT1[:, 1:]
        if self.prompt:
            targets_MT = targets_MT.clone()
            targets_MT[:, : self.prompt] = IGNORE
        return Batch(windows_MT1[:, :-1], targets_MT)

    def loss(self, output: ModelOutput, batch: Batch, inv_n: Tensor, terms: Iterable[LossTerm] = ()) -> LossSums:
        return token_loss(output, batch, inv_n, terms)

    def trivial_loss(self, unigram_entropy: float | None) -> float | None:
        return unigram_entropy

    def metrics(self, nats: float, n_targets: int, n_bytes: int) -> dict[str, float]:
        """`val/loss` in nats per token, `val/ppl` its exponential, and `val/bits_per_byte`, which is comparable across
        tokenizers and left out where the text is not known."""
        loss = nats / n_targets
        measured = {"val/loss": loss, "val/ppl": perplexity(loss)}
        return measured | ({"val/bits_per_byte": nats / math.log(2) / n_bytes} if n_bytes else {})
