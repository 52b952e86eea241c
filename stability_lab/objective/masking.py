"""Masked tokens: which positions a model is to predict, and what it sees there (BERT, arXiv:1810.04805, 3.1).

Each position is chosen with probability `rate`. Of the chosen ones 80 % become [MASK], 10 % another id, drawn from all
that are not reserved, and 10 % stay. Reserved ids (special ones, the end of a document) are never chosen.

What is drawn for a sample is a hash of (seed, number of the sample, place), so it is the same whatever the batch, and
a resumed run needs no state. Validation samples, whose numbers are negative, leave the seed out: their masks are those
of every run.

Shape letters: M samples, T tokens, N draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stability_lab.objective.loss import IGNORE
from stability_lab.objective.objective import Vocabulary

AS_MASK, AS_OTHER = 0.8, 0.1


class Masking(NamedTuple):
    """`words`: a word is masked whole or not at all (each of its tokens is replaced for itself). `static`: the draws
    belong to the text and not to the sample's number, so that a window has the same mask in every epoch."""

    vocabulary: Vocabulary
    seed: int
    rate: float
    words: bool = False
    static: bool = False

    def draws(self, text_MT: Tensor, first: int, n: int) -> Tensor:
        """(M, N) of numbers in [0, 1) for samples first, first + 1, ... with this text."""
        number_M = torch.arange(first, first + len(text_MT), device=text_MT.device)
        seed = torch.full_like(number_M, self.seed).where(number_M >= 0, 0)
        key_M = hashed(text_MT) if self.static else number_M
        return uniform(key_M + mixed(seed + _GOLDEN), n)

    def apply(self, tokens_MT: Tensor, draws_MN: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets; the first 3 T draws count."""
        v, T = self.vocabulary, tokens_MT.shape[1]
        chance_MT, action_MT, which_MT = draws_MN[:, : 3 * T].reshape(-1, 3, T).unbind(1)
        reserved_MT = torch.zeros_like(tokens_MT, dtype=torch.bool)
        other_MT = (which_MT * (v.size - len(v.reserved))).long()
        for id in v.reserved:
            reserved_MT |= tokens_MT == id
            other_MT += other_MT >= id
        if self.words:
            chance_MT = chance_MT.gather(1, word_starts(tokens_MT, v))
        chosen_MT = (chance_MT < self.rate) & ~reserved_MT
        seen_MT = other_MT.where(action_MT < AS_MASK + AS_OTHER, tokens_MT)
        seen_MT = seen_MT.masked_fill(action_MT < AS_MASK, v.mask)
        return seen_MT.where(chosen_MT, tokens_MT), tokens_MT.masked_fill(~chosen_MT, IGNORE)


def word_starts(tokens_MT: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Position of the first token of each token's word, (M, T)."""
    continues_V, continued_V = vocabulary.continues_V, vocabulary.continued_V
    assert continues_V is not None
    assert continued_V is not None
    goes_on = continues_V.to(tokens_MT.device)[tokens_MT[:, 1:]] & continued_V.to(tokens_MT.device)[tokens_MT[:, :-1]]
    place_MT = torch.arange(tokens_MT.shape[1], device=tokens_MT.device).expand_as(tokens_MT)
    starts = torch.cat([place_MT[:, :1], place_MT[:, 1:].masked_fill(goes_on, 0)], 1)
    return starts.cummax(1).values


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return x - 2**64 if x >= 2**63 else x


_GOLDEN, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(x: Tensor) -> Tensor:
    """SplitMix64 of int64 numbers, as `data.loader` has it in numpy: a one-to-one map whose outputs pass as random."""
    x = x * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, n: int) -> Tensor:
    """To the right, zeros moving in."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def hashed(tokens_MT: Tensor) -> Tensor:
    """One number for the ids of each row, (M,)."""
    place_T = mixed(torch.arange(tokens_MT.shape[1], device=tokens_MT.device))
    return mixed(tokens_MT + place_T).sum(1)


def uniform(key_M: Tensor, n: int) -> Tensor:
    """(M, n) of fp64 in [0, 1): 53 bits of a hash of (key, place)."""
    place_N = torch.arange(n, device=key_M.device)
    return _shifted(mixed(mixed(key_M)[:, None] + place_N), 11).double() * 2.0**-53
