"""Positions: rotary (arXiv:2104.09864) and the sinusoidal table (arXiv:1706.03762).

Shape letters: B batch, T tokens, H heads, K head_dim, D d_model.
"""

import torch
from torch import Tensor


def rope_table(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / K), each (T, 1, K / 2) in fp32: they broadcast over heads."""
    inverse_wavelength = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse_wavelength)
    return angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + K/2) of each head, in fp32; dtype of the input."""
    t = x_BTHK.shape[1]
    cos, sin = cos[:t], sin[:t]
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)


def sinusoidal_table(seq_len: int, d_model: int) -> Tensor:
    """(T, D): sin in the even columns, cos in the odd ones."""
    position = torch.arange(seq_len, dtype=torch.float64)[:, None]
    column = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position * 10_000.0 ** (-column / d_model)
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return table[:, :d_model].float()
