"""Arithmetic that the model and the stabilizers share.

What has a `fused` argument is computed in few passes on a CPU, with the gradient written out; without it, it is the
formula, which autograd differentiates (`model.implementation`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SIGMOID_CAP = 100.0  # up to here the cap is formed from a sigmoid, which costs half of tanh and loses about cap * 1e-7


def fp32(x: Tensor) -> Tensor:
    """`x` in fp32 (fp64 stays): norms, softmax and losses never run in a lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Cap(nn.Module):
    """Elementwise cap * tanh(x / cap) in fp32 (fp64 stays); the cap is a tensor: another one needs no recompilation."""

    cap: Tensor

    def __init__(self, cap: float, fused: bool = True):
        super().__init__()
        self.register_buffer("cap", torch.tensor(float(cap)), persistent=False)
        self.by_sigmoid = fused and cap <= SIGMOID_CAP

    def forward(self, x: Tensor) -> Tensor:
        # On CUDA tanh costs no more, and FlexAttention takes no backward pass of our own.
        if x.device.type == "cpu" and self.by_sigmoid:
            return _CapBySigmoid.apply(fp32(x), self.cap)  # pyright: ignore[reportReturnType]
        return self.cap * torch.tanh(fp32(x) / self.cap)

    def extra_repr(self) -> str:
        return f"cap={self.cap.item():g}"


class _CapBySigmoid(torch.autograd.Function):
    """y = cap * (2 sigmoid(2x / cap) - 1) = cap * tanh(x / cap); dx = (1 - (y / cap)^2) * dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: Tensor) -> Tensor:
        cap = cap.to(x.dtype)  # 2 / cap is no number of fp32
        y = torch.sigmoid(x * (2 / cap)).mul_(2 * cap).sub_(cap)
        ctx.save_for_backward(y, cap)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        y, cap = ctx.saved_tensors
        return (y / cap).square_().neg_().add_(1).mul_(grad_y), None


def rms_norm(x: Tensor, gain: Tensor | None, eps: float, fused: bool = True) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension (arXiv:1910.07467), in fp32; fp32 (or fp64) out.

    torch's own is one kernel on CUDA and under torch.compile. In eager mode on CPU it is a dozen small operations
    (`python -m benchmarks.numerics`).
    """
    x = fp32(x)
    if not fused:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normal if gain is None else normal * gain
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    return _RMSNorm.apply(x, gain, eps)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    """y = x * r * gain with r = (mean(x^2) + eps)^(-1/2); dx = r * (dz - x * r * mean(dz * x * r)), dz = dy * gain.

    LayerNorm's kernel with a mean of 0 gives r * (dz - mean(dz) - x * r * mean(dz * x * r)), and the gain's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        r = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, r)
        return x * r if gain is None else (x * r).mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore
        x, gain, r = ctx.saved_tensors
        wanted = [True, gain is not None, False]
        grad_x, grad_gain, _ = torch.ops.aten.native_layer_norm_backward.default(
            grad_y, x, x.shape[-1:], torch.zeros_like(r), r, gain, None, wanted
        )
        mean = grad_y.mean(-1) if gain is None else (grad_y @ gain).div_(x.shape[-1])
        return grad_x.addcmul_(mean.unsqueeze(-1), r), grad_gain if gain is not None else None, None
