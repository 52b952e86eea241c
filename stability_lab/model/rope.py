"""Positions: rotary (arXiv:2104.09864) and the sinusoidal table (arXiv:1706.03762).

Shape letters: B batch, T tokens, H heads, K head_dim, D d_model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stability_lab.model.layers import Embedding
from stability_lab.numerics import fp32


class Rope(nn.Module):
    """(x_BTHK) -> the same shape and dtype, rotated by position; one instance serves all layers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int, theta: float, fused: bool = True):
        super().__init__()
        self.fused = fused
        cos, sin = on_default_device(lambda: rope_table(seq_len, head_dim, theta))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return rotate(x_BTHK, self.cos, self.sin, self.fused)


class LearnedPositions(Embedding):
    """(x_BTD) -> x plus a learned vector for each position (arXiv:1706.03762, table 3 E)."""

    def forward(self, input: Tensor) -> Tensor:
        return input + self.weight[: input.shape[1]]


class SinusoidalPositions(nn.Module):
    """(x_BTD) -> x plus the sinusoidal table."""

    table: Tensor

    def __init__(self, seq_len: int, d_model: int):
        super().__init__()
        (table,) = on_default_device(lambda: (sinusoidal_table(seq_len, d_model),))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.table[: x_BTD.shape[1]]


def on_default_device(make: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Tables, computed on the CPU: on the meta device their computation would load torch's compiler."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        tables = make()
        return [torch.empty_like(t, device=device) if device.type == "meta" else t.to(device) for t in tables]


def rope_table(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos (T, 1, K) and sin (T, 1, K/2) of position * theta^(-2i / K) in fp32; they broadcast over heads.

    Entry i and entry i + K/2 of a head form a pair with one angle.
    """
    inverse_wavelength = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse_wavelength)
    cos = angle.cos()
    return torch.cat((cos, cos), -1).float().unsqueeze(1), angle.sin().float().unsqueeze(1)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor, fused: bool = True) -> Tensor:
    """Rotate the pairs of each head by the angles of `rope_table`, in fp32; dtype of the input."""
    t = x_BTHK.shape[1]
    x, cos, sin = fp32(x_BTHK), cos[:t], sin[:t]
    if fused:
        return _Rotate.apply(x, cos, sin).to(x_BTHK.dtype)
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b * sin, a * sin), -1)).to(x_BTHK.dtype)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so nothing of `x` need be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Each half of the result is written where it belongs, so no half is copied."""
    y = x * cos
    (a, b), (y_a, y_b) = x.chunk(2, -1), y.chunk(2, -1)
    y_a.addcmul_(b, sin, value=-direction)
    y_b.addcmul_(a, sin, value=direction)
    return y


def sinusoidal_table(seq_len: int, d_model: int) -> Tensor:
    """(T, D): sin in the even columns, cos in the odd ones."""
    position = torch.arange(seq_len, dtype=torch.float64)[:, None]
    column = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position * 10_000.0 ** (-column / d_model)
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return table[:, :d_model].float()
