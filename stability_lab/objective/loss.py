"""Cross-entropy and auxiliary terms from one log-softmax, in fp32.

    L = (1/N) * sum over valid tokens of [ log Z - logit of the target + sum of terms ]

N is the number of valid tokens of the whole optimizer step (all micro-batches), known before the first backward, so
that gradients are those of one large batch even where micro-batches hold different numbers of valid tokens. A batch
without a valid token contributes exactly 0. With no term, or one of weight 0, the result is plain cross-entropy bit
for bit.

Shape letters: N tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stability_lab.numerics import fp32
from stability_lab.seams import LossRecord, LossTerm

IGNORE = -100  # a target that is not to be predicted


class LossSums(NamedTuple):
    """0-d tensors. `objective` is what to differentiate (already divided by N); the rest is detached sums."""

    objective: Tensor
    ce: Tensor  # sum over valid tokens, nats
    terms: tuple[Tensor, ...]  # sum of each weighted auxiliary term
    z_raw: Tensor  # sum of log Z squared
    log_z: Tensor  # sum of log Z
    log_z_max: Tensor  # largest |log Z|
    measured: tuple[Tensor, ...] = ()  # sums of what the objective measures besides

    def plus(self, other: LossSums) -> LossSums:
        """The sums of two micro-batches together, without their graphs."""
        return LossSums(
            objective=self.objective.detach() + other.objective.detach(),
            ce=self.ce + other.ce,
            terms=tuple(a + b for a, b in zip(self.terms, other.terms, strict=True)),
            z_raw=self.z_raw + other.z_raw,
            log_z=self.log_z + other.log_z,
            log_z_max=torch.maximum(self.log_z_max, other.log_z_max),
            measured=tuple(a + b for a, b in zip(self.measured, other.measured, strict=True)),
        )


class _LogZAndCrossEntropy(torch.autograd.Function):
    """(logits, targets) -> per-token log Z and cross-entropy.

    d log Z / d logits = p and d CE / d logits = p - onehot, so one pass over the logits serves both gradients and
    an auxiliary term costs O(N) where autograd alone would pay a second softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        index = target_N[:, None]
        log_p_NV = torch.log_softmax(logits_NV, -1, dtype=dtype)
        ce_N = -log_p_NV.gather(1, index).squeeze(1)
        log_z_N = logits_NV.gather(1, index).squeeze(1).to(dtype) + ce_N
        ctx.save_for_backward(log_p_NV, target_N)
        ctx.logits_dtype = logits_NV.dtype
        return log_z_N, ce_N

    @staticmethod
    def backward(ctx: Any, grad_log_z_N: Tensor, grad_ce_N: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        log_p_NV, target_N = ctx.saved_tensors
        gradient = log_p_NV.exp().mul_((grad_ce_N + grad_log_z_N)[:, None])
        gradient.scatter_add_(1, target_N[:, None], -grad_ce_N[:, None])
        return gradient.to(ctx.logits_dtype), None


def _log_z_and_cross_entropy(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = fp32(logits_NV)
    return logits_NV.logsumexp(-1), F.cross_entropy(logits_NV, target_N, reduction="none")


def language_model_loss(
    logits_NV: Tensor,
    targets_N: Tensor,
    inv_n: Tensor,
    terms: Iterable[LossTerm] = (),
    unembedding_VD: Tensor | None = None,
    fused: bool = True,
) -> LossSums:
    """`inv_n`: 0-d fp32 tensor, 1 / number of valid tokens of the whole optimizer step (0 where there is none).

    `unembedding_VD` is for terms that look at it; without one they see an empty matrix. Not `fused`: autograd's own
    gradient of torch's own cross-entropy and log-sum-exp.
    """
    valid_N = targets_N != IGNORE
    with torch.autocast(logits_NV.device.type, enabled=False):
        log_z_and_ce = _LogZAndCrossEntropy.apply if fused else _log_z_and_cross_entropy
        log_z_N, ce_N = log_z_and_ce(logits_NV, targets_N.clamp_min(0))  # pyright: ignore
        ce = torch.where(valid_N, ce_N, 0.0).sum()
        unembedding_VD = logits_NV.new_empty(0, 0) if unembedding_VD is None else unembedding_VD
        record = LossRecord(log_z_N, logits_NV, unembedding_VD)
        penalties = tuple(torch.where(valid_N, term(record), 0.0).sum() for term in terms)
        seen_N = torch.where(valid_N, log_z_N.detach(), 0.0)
        return LossSums(
            objective=(ce + sum(penalties, torch.zeros_like(ce))) * inv_n,
            ce=ce.detach(),
            terms=tuple(penalty.detach() for penalty in penalties),
            z_raw=seen_N.square().sum(),
            log_z=seen_N.sum(),
            log_z_max=seen_N.abs().amax(),
        )
