"""Masked language modelling: the targets are the ids at masked positions, which the model sees from both sides.

`masked_lm` reads [CLS] text [SEP], as RoBERTa does (arXiv:1907.11692, full sentences without the next-sentence loss).
`masked_lm_nsp` is BERT's objective (arXiv:1810.04805): [CLS] a [SEP] b [SEP], in which b follows a in the text (class
0) or, in half of the samples, is of another window (class 1), and the cross-entropy of that class is added:

    L = mean over masked positions of CE + mean over samples of CE of the class

A window has one id more than a sample, and special ids take the place of others: of each window of seq_len + 1 ids
the last 3 (4 with two texts) are not read.

Shape letters: M samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stability_lab.config import option
from stability_lab.judge.series import perplexity
from stability_lab.numerics import fp32
from stability_lab.objective.loss import LossSums
from stability_lab.objective.masking import Masking
from stability_lab.objective.objective import Batch, Traits, Vocabulary, token_loss
from stability_lab.seams import LossTerm, ModelOutput

_MASKED = Traits("encoder", special=True, perplexity="masked_ppl")


@dataclass(frozen=True)
class MaskedLM:
    """`mask_rate` of the positions; `whole_words`: words are masked whole; `static`: a text has one mask for ever."""

    name: ClassVar[str] = "masked_lm"
    traits: ClassVar[Traits] = _MASKED

    mask_rate: float = option(0.15, gt=0, lt=1)
    whole_words: bool = False
    static: bool = False

    def bound(self, vocabulary: Vocabulary | None, seed: int) -> MaskedText:
        assert vocabulary is not None
        return MaskedText(Masking(vocabulary, seed, self.mask_rate, self.whole_words, self.static))


@dataclass(frozen=True)
class MaskedLMNextSentence:
    """`mask_rate` of the positions; `whole_words`: words are masked whole."""

    name: ClassVar[str] = "masked_lm_nsp"
    traits: ClassVar[Traits] = _MASKED._replace(windows=2, classes=2, columns=("nsp_loss", "nsp_accuracy"))

    mask_rate: float = option(0.15, gt=0, lt=1)
    whole_words: bool = False

    def bound(self, vocabulary: Vocabulary | None, seed: int) -> MaskedPairs:
        assert vocabulary is not None
        return MaskedPairs(Masking(vocabulary, seed, self.mask_rate, self.whole_words))


@dataclass(frozen=True)
class MaskedText:
    """`masked_lm` of one vocabulary and seed."""

    masking: Masking
    traits: ClassVar[Traits] = MaskedLM.traits

    def batch(self, windows_MT1: Tensor, first: int) -> Batch:
        v, text_MT = self.masking.vocabulary, windows_MT1[:, :-3]
        tokens_MT = F.pad(F.pad(text_MT, (1, 0), value=v.cls), (0, 1), value=v.sep)
        inputs, targets = self.masking.apply(tokens_MT, self.masking.draws(text_MT, first, 3 * tokens_MT.shape[1]))
        return Batch(inputs, targets, torch.zeros_like(inputs))

    def loss(self, output: ModelOutput, batch: Batch, inv_n: Tensor, terms: Iterable[LossTerm] = ()) -> LossSums:
        return token_loss(output, batch, inv_n, terms)

    def trivial_loss(self, unigram_entropy: float | None) -> float | None:
        return unigram_entropy

    def metrics(self, nats: float, n_targets: int, n_bytes: int) -> dict[str, float]:
        """`val/loss` in nats per masked token, and `val/masked_ppl`, its exponential. Masked tokens do not add up to
        the text, so there are no bits per byte."""
        loss = nats / n_targets
        return {"val/loss": loss, f"val/{self.traits.perplexity}": perplexity(loss)}


@dataclass(frozen=True)
class MaskedPairs(MaskedText):
    """`masked_lm_nsp` of one vocabulary and seed."""

    traits: ClassVar[Traits] = MaskedLMNextSentence.traits

    def batch(self, windows_MT1: Tensor, first: int) -> Batch:
        v, (here, elsewhere) = self.masking.vocabulary, windows_MT1.chunk(2, 1)
        M, T = len(here), here.shape[1] - 1
        a = (T - 3) // 2
        draws = self.masking.draws(here, first, 3 * T + 1)
        labels_M = (draws[:, -1] >= 0.5).long()
        # The same places of both windows, so that nothing but the text says which it is.
        second = torch.where(labels_M[:, None] == 1, elsewhere, here)[:, a : T - 3]
        cls, sep = (here.new_full((M, 1), id) for id in (v.cls, v.sep))
        tokens_MT = torch.cat([cls, here[:, :a], sep, second, sep], 1)
        inputs, targets = self.masking.apply(tokens_MT, draws)
        segments = (torch.arange(T, device=here.device) > a + 1).long().expand_as(inputs)
        return Batch(inputs, targets, segments, labels_M, torch.ones(M, device=here.device))

    def loss(self, output: ModelOutput, batch: Batch, inv_n: Tensor, terms: Iterable[LossTerm] = ()) -> LossSums:
        sums = super().loss(output, batch, inv_n, terms)
        assert output.classes_BC is not None
        assert batch.labels_M is not None
        assert batch.weights_M is not None
        with torch.autocast(output.classes_BC.device.type, enabled=False):
            logits_MC = fp32(output.classes_BC)
            ce = (F.cross_entropy(logits_MC, batch.labels_M, reduction="none") * batch.weights_M).sum()
            right = ((logits_MC.argmax(-1) == batch.labels_M) * batch.weights_M).sum()
        return sums._replace(objective=sums.objective + ce, measured=(ce.detach(), right))
