"""Head and loss some samples at a time, with their gradients formed at once, so that no step stores more logits.

    for each chunk of samples: logits, loss, d loss / d features, d loss / d weights of the head

The parts are those of the plain path, `GPT.output` and `Objective.loss` under autograd, so every transform of the
logits and every loss term takes part. Beside the logits of one chunk it holds one more copy of the head's gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stability_lab.model.transformer import GPT
from stability_lab.objective.loss import LossSums
from stability_lab.objective.objective import Batch, Objective
from stability_lab.seams import LossTerm

LOGITS = 2**22  # of a micro-batch (16 MiB in fp32): above, the loss is formed in chunks
ROWS = 512  # tokens of a chunk, as far as whole samples allow; fewer make small products (docs/performance.md)

Forward = Callable[[Batch, Tensor], tuple[LossSums, Tensor]]


def chunked_loss(plain: Forward, model: GPT, objective: Objective, terms: Sequence[LossTerm]) -> Forward:
    """As `plain`, which takes the micro-batches with `LOGITS` logits or fewer."""

    def forward(batch: Batch, inv_n: Tensor) -> tuple[LossSums, Tensor]:
        tokens = batch.inputs_MT.numel()
        if not _is_large(tokens, model):
            return plain(batch, inv_n)
        x_MTD, bound_L = model.features(batch.inputs_MT, batch.segments_MT)

        def loss(part: Batch, x: Tensor) -> LossSums:
            return objective.loss(model.output(x, bound_L), part, inv_n, terms)

        kept: list[LossSums] = []
        parts = batch.chunks(-(-tokens // ROWS))
        objective_sum = _InChunks.apply(loss, parts, kept, x_MTD, *model.head_parameters())
        return functools.reduce(LossSums.plus, kept)._replace(objective=objective_sum), bound_L

    return forward


def samples_at_once(n: int, model: GPT) -> int:
    """Of a micro-batch of `n` samples: all, or the samples of one chunk."""
    seq_len = model.config.seq_len
    return max(1, ROWS // seq_len) if _is_large(n * seq_len, model) else n


def _is_large(tokens: int, model: GPT) -> bool:
    """Whether so many tokens have more than `LOGITS` logits, those of rows that pad the vocabulary among them."""
    return tokens * len(model.unembedding) > LOGITS


class _InChunks(torch.autograd.Function):
    """(features, weights of the head) -> the objective; `kept` gets the sums of each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Batch, Tensor], LossSums],
        parts: Sequence[Batch],
        kept: list[LossSums],
        x_MTD: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        grad_x, totals = [], None
        for part, x in zip(parts, x_MTD.split([len(part.inputs_MT) for part in parts]), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                sums = loss(part, x)
                of_x, *grads = torch.autograd.grad(sums.objective, (x, *weights), materialize_grads=True)
            kept.append(sums._replace(objective=sums.objective.detach()))
            grad_x.append(of_x)
            totals = grads if totals is None else [a.add_(b) for a, b in zip(totals, grads, strict=True)]
        ctx.gradients = (torch.cat(grad_x), *(totals or ()))
        return functools.reduce(torch.add, (sums.objective for sums in kept))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, None, *(gradient.mul_(grad) for gradient in ctx.gradients)
