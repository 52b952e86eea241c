"""What an encoder has beside the transformer's blocks (BERT, arXiv:1810.04805), and what a decoder has there: nothing.

Shape letters: B batch, T tokens, D d_model, C classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stability_lab.model.layers import Embedding, Linear


class Segments(Embedding):
    """(x_BTD, segments_BT) -> x plus a learned vector for each segment; None: all tokens are in the first."""

    def forward(self, input: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        return input + (self.weight[0] if segments_BT is None else super().forward(segments_BT))


class NoSegments(nn.Module):
    def forward(self, x_BTD: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        return x_BTD


class HeadTransform(nn.Module):
    """(B, T, D) -> (B, T, D) before the unembedding: dense, GELU, norm."""

    def __init__(self, d_model: int, norm: nn.Module):
        super().__init__()
        self.dense, self.norm = Linear(d_model, d_model), norm

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x_BTD)))


class SequenceHead(nn.Module):
    """(B, T, D) -> (B, C): the pooler, tanh of a dense layer on the first token, and a linear classifier."""

    def __init__(self, d_model: int, classes: int):
        super().__init__()
        self.pooler, self.classifier = Linear(d_model, d_model), Linear(d_model, classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.classifier(self.pooler(x_BTD[:, 0]).tanh())


class NoSequenceHead(nn.Module):
    classifier = None

    def forward(self, x_BTD: Tensor) -> None:
        return None
