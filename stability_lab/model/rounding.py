"""Rounding on purpose, in the forward pass, that hardware of another kind or another program does (`model.rounding`).

The seams keep their fillings: what is rounded is what comes out of them or goes into them.

MXFP8 (OCP Microscaling 1.0; arXiv:2506.20752): 32 values that follow each other share a power of two, that of the
largest less 8, and each is a number of 4 exponent and 3 fraction bits (e4m3) times it. What is then above 448 becomes
448. The gradient passes as if nothing had been rounded, and backward products have the run's own precision.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stability_lab.config import ModelConfig, RoundingConfig
from stability_lab.model.layers import Linear
from stability_lab.seams import Seams, Site

BLOCK = 32  # values that share an exponent
E4M3_MAX = 448.0
_E4M3_EXPONENT, _E4M3_LEAST, _E4M3_FRACTION = 8, -6, 3  # exponents of the largest and the least normal number; bits


def e4m3(x: Tensor) -> Tensor:
    """The nearest number of 4 exponent and 3 fraction bits, ties to even; beyond 448 that."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    exponent = (torch.frexp(x).exponent - 1).clamp_min(_E4M3_LEAST)
    step = torch.ldexp(torch.ones_like(x), exponent - _E4M3_FRACTION)
    return (x / step).round() * step


def mxfp8(x: Tensor) -> Tensor:
    """(..., K) to MXFP8 and back, in blocks along the last dimension; a block that is not finite becomes NaN."""
    return _MXFP8.apply(x)  # pyright: ignore[reportReturnType]


class _MXFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        blocks = F.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        exponent = (torch.frexp(largest).exponent - 1 - _E4M3_EXPONENT).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        rounded = torch.where(largest.isfinite(), e4m3(blocks / scale) * scale, torch.nan)
        return rounded.flatten(-2)[..., :size]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class MXLinear(Linear):
    """Input and weight rounded along the dimension that is summed over."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(mxfp8(input), mxfp8(self.weight), self.bias)


class MXGain(nn.Module):
    """A norm whose gain is rounded; a bias is not."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        gains = {name: mxfp8(gain) for name, gain in self.norm.named_parameters() if name != "bias"}
        return functional_call(self.norm, gains, x)


class BFloat16(nn.Module):
    """Rounded to bf16, in the dtype of the input; so is the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)


def linear(config: ModelConfig, d_in: int, d_out: int) -> Linear:
    """A linear layer of a block."""
    kind = Linear if config.rounding.linears is None else MXLinear
    return kind(d_in, d_out, bias=config.bias)


def rounded(seams: Seams, rounding: RoundingConfig) -> Seams:
    """Seams whose modules round: gains of norms, logits of the head before their transform, attention logits."""

    def norm(site: Site) -> nn.Module:
        return MXGain(seams.norm(site))

    def logit_transform(site: Site) -> nn.Module:
        return nn.Sequential(BFloat16(), seams.logit_transform(site))

    def score_restore(site: Site) -> float:
        return seams.score_restore(site) or 1.0

    changes: dict[str, Any] = {}
    if rounding.gains is not None:
        changes["norm"] = norm
    if rounding.logits is not None:
        changes["logit_transform"] = logit_transform
    if rounding.scores is not None:
        changes["score_restore"] = score_restore
    return dataclasses.replace(seams, **changes)
