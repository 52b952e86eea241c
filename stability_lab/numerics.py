"""Arithmetic that the model and the stabilizers share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fp32(x: Tensor) -> Tensor:
    """`x` in fp32 (fp64 stays): norms, softmax and losses never run in a lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: Tensor) -> Tensor:
    """cap * tanh(x / cap), elementwise in fp32 (fp64 stays)."""
    return cap * torch.tanh(fp32(x) / cap)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv:1910.07467), in fp32; fp32 (or fp64) out.

    torch's own is one kernel on CUDA and under torch.compile. In eager mode on CPU it is a dozen small operations,
    where this backward pass, written out, takes 0.6 of its time (`python benchmarks/numerics.py`).
    """
    x = fp32(x)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    normal = _Normalise.apply(x, eps)
    return normal if gain is None else normal * gain


class _Normalise(torch.autograd.Function):
    """y = x * r with r = (mean(x^2) + eps)^(-1/2); dx = r * (dy - y * mean(dy * y))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        r = mean_square.add_(eps).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        y, r = ctx.saved_tensors
        mean = (grad_y * y).mean(-1, keepdim=True)
        return torch.addcmul(grad_y, y, mean, value=-1).mul_(r), None
