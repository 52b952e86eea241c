"""Causal self-attention with grouped keys and values, and the two ways to compute it.

Back-ends are chosen once, in the constructor. `sdpa` is torch's fused kernel. `explicit` forms the logits in fp32,
a block of queries at a time: it is the reference for tests and the path of the probe, because fused kernels do not
give the logits away.

Shape letters: B batch, T query tokens, S key tokens, D d_model, H heads, G key/value heads, K head_dim, C a block
of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stability_lab.config import ModelConfig
from stability_lab.model.rope import rotate
from stability_lab.numerics import fp32
from stability_lab.seams import AttentionShape, Seams

QUERY_BLOCK = 256  # rows of logits that the explicit path holds at once


class Backend(NamedTuple):
    name: str
    reason: str


def choose_backend(requested: str, seams: Seams) -> Backend:
    """The back-end of every layer and why; both go to the log and the manifest."""
    if requested != "auto":
        return Backend(requested, f"model.attention={requested}")
    return Backend("sdpa", "no stabilizer acts on the attention logits")


class AttentionStats(NamedTuple):
    """Exact statistics of one layer's logits, after scaling and before the mask's -inf; (H,) each, fp32."""

    max_logit_H: Tensor  # signed
    max_abs_logit_H: Tensor
    entropy_H: Tensor  # mean over queries of entropy / ln(number of keys), the first query left out


class Attention(nn.Module):
    """(x_BTD, rope) -> (B, T, D), and an upper bound on the layer's attention logits."""

    def __init__(self, config: ModelConfig, layer: int, seams: Seams, backend: str):
        super().__init__()
        d, h = config.d_model, config.n_heads
        g = config.n_kv_heads or h
        self.n_heads, self.n_kv_heads, self.head_dim = h, g, d // h
        self.backend, self.dropout = backend, config.dropout
        self.scale = 1 / math.sqrt(self.head_dim)
        self.wq = nn.Linear(d, d, bias=config.bias)
        self.wk = nn.Linear(d, g * self.head_dim, bias=config.bias)
        self.wv = nn.Linear(d, g * self.head_dim, bias=config.bias)
        self.wo = nn.Linear(d, d, bias=config.bias)
        self.qk_transform = seams.qk_transform(AttentionShape(layer, config.n_layers, h, g, self.head_dim))

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, stats: list[AttentionStats] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`stats`, where given, receives this layer's exact statistics (a probe; costs O(T^2) in fp32)."""
        B, T, _ = x_BTD.shape
        q = self.wq(x_BTD).view(B, T, self.n_heads, self.head_dim)
        k = self.wk(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        v = self.wv(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        q, k = self.qk_transform(q, k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        bound = logit_bound(q.detach(), k.detach(), self.scale)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if stats is not None:
            stats.append(logit_stats(q, k, self.scale))
        dropout = self.dropout if self.training else 0.0
        if self.backend == "sdpa":
            y_BHTK = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.n_kv_heads != self.n_heads
            )
        else:
            y_BHTK = explicit_attention(q, k, v, self.scale, dropout)
        return self.wo(y_BHTK.transpose(1, 2).reshape(B, T, -1)), bound

    def extra_repr(self) -> str:
        return f"backend={self.backend}"


def logit_bound(q_BTHK: Tensor, k_BTGK: Tensor, scale: float) -> Tensor:
    """max over heads of scale * max|q| * max|k|: no logit of the layer is larger (Cauchy-Schwarz). O(B T D)."""
    q_H = fp32(q_BTHK).square().sum(-1).amax((0, 1))
    k_G = fp32(k_BTGK).square().sum(-1).amax((0, 1))
    k_H = k_G if len(k_G) == len(q_H) else k_G.repeat_interleave(len(q_H) // len(k_G))
    return scale * (q_H * k_H).amax().sqrt()


def explicit_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scale: float, dropout: float) -> Tensor:
    """softmax(scale * q k^T + causal mask) v with logits and softmax in fp32; dtype of `v`.

    Blocks of queries are recomputed in the backward pass, so memory is O(QUERY_BLOCK * S) and not O(T * S).
    """
    k_BHSK, v_BHSK = _spread_kv(k_BGSK, q_BHTK.shape[1]), _spread_kv(v_BGSK, q_BHTK.shape[1])
    T = q_BHTK.shape[2]
    blocks = []
    for start, stop in _query_blocks(T):
        args = (q_BHTK[:, :, start:stop], k_BHSK[:, :, :stop], v_BHSK[:, :, :stop], scale, start, dropout)
        if T > QUERY_BLOCK and torch.is_grad_enabled():
            blocks.append(checkpoint(_attend_block, *args, use_reentrant=False))
        else:
            blocks.append(_attend_block(*args))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _attend_block(q_BHCK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, scale: float, start: int, dropout: float) -> Tensor:
    with torch.autocast(q_BHCK.device.type, enabled=False):
        logits, future = _block_logits(q_BHCK, k_BHSK, scale, start)
        weights = logits.masked_fill(future, -math.inf).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return (weights @ fp32(v_BHSK)).to(v_BHSK.dtype)


def _block_logits(q_BHCK: Tensor, k_BHSK: Tensor, scale: float, start: int) -> tuple[Tensor, Tensor]:
    """Scaled logits (B, H, C, S) in fp32 of the queries from `start` on, and the mask of keys in their future."""
    logits = (fp32(q_BHCK) * scale) @ fp32(k_BHSK).transpose(-1, -2)
    c, s = logits.shape[-2:]
    query = torch.arange(start, start + c, device=logits.device)
    return logits, torch.arange(s, device=logits.device) > query[:, None]


def _query_blocks(T: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + QUERY_BLOCK, T)) for start in range(0, T, QUERY_BLOCK))


def _spread_kv(x_BGSK: Tensor, n_heads: int) -> Tensor:
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == n_heads else x_BGSK.repeat_interleave(n_heads // groups, dim=1)


@torch.no_grad()
def logit_stats(q_BHTK: Tensor, k_BGSK: Tensor, scale: float) -> AttentionStats:
    """Exact statistics per head over all pairs (query, key not in its future)."""
    B, H, T, _ = q_BHTK.shape
    k_BHSK = _spread_kv(k_BGSK, H)
    largest = torch.full((H,), -math.inf, device=q_BHTK.device)
    smallest = torch.full((H,), math.inf, device=q_BHTK.device)
    entropy = torch.zeros(H, device=q_BHTK.device)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        for start, stop in _query_blocks(T):
            logits, future = _block_logits(q_BHTK[:, :, start:stop], k_BHSK[:, :, :stop], scale, start)
            smallest = torch.minimum(smallest, logits.masked_fill(future, math.inf).amin((0, 2, 3)))
            logits = logits.masked_fill(future, -math.inf)
            largest = torch.maximum(largest, logits.amax((0, 2, 3)))
            log_p = logits.log_softmax(-1)
            entropy_BHC = -(log_p.exp() * log_p.masked_fill(future, 0.0)).sum(-1)
            # The first query sees one key: its entropy and ln 1 are both 0, and it is left out.
            n_keys = torch.arange(start + 1, stop + 1, device=q_BHTK.device).log()
            entropy += (entropy_BHC / n_keys.clamp_min(1e-9))[:, :, int(start == 0) :].sum((0, 2))
    return AttentionStats(largest, torch.maximum(largest.abs(), smallest.abs()), entropy / (B * max(T - 1, 1)))
