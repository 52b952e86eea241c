"""Self-attention with grouped keys and values, its three kernels, and exact statistics of its logits.

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
from stability_lab.model.flex import flex_attention, on_scores
from stability_lab.model.mask import CAUSAL, Mask
from stability_lab.model.rounding import linear
from stability_lab.numerics import fp32
from stability_lab.seams import ScoreMod, Seams, Site

QUERY_BLOCK = 256  # rows of logits that the explicit path holds at once


class AttentionStats(NamedTuple):
    """Exact statistics of one layer's logits, after scaling and before `score_mod` and mask; fp32."""

    max_logit_H: Tensor  # signed
    max_abs_logit_H: Tensor
    entropy_H: Tensor  # mean over queries of entropy / ln(number of keys), the first query left out
    score_mod: dict[str, Tensor]  # 0-d: "share/REGION" and "pass/REGION" of `score_mod`'s regions, "pass" of all


class Unwatched(nn.Module):
    """Null object of every layer's `watch`; a probe takes its place for one forward pass."""

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, mask: Mask) -> None:
        return None


class Attention(nn.Module):
    """(x_BTD, mask) -> (B, T, D), and an upper bound on the layer's attention logits.

    `rotate` is applied to queries and keys: RoPE, or nothing. `watch` gets queries, keys and mask.
    """

    def __init__(self, config: ModelConfig, site: Site, seams: Seams, backend: str, rotate: nn.Module | None = None):
        super().__init__()
        d, k = site.d_model, site.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = site.n_heads, site.n_kv_heads, k
        self.backend, self.dropout = backend, config.dropout
        self.scale = 1 / math.sqrt(k)
        self.wq = linear(config, d, d)
        self.wk = linear(config, d, site.n_kv_heads * k)
        self.wv = linear(config, d, site.n_kv_heads * k)
        self.wo = linear(config, d, d)
        self.qk_transform = seams.qk_transform(site)
        self.attn_scale = seams.attn_scale(site)
        self.score_mod = seams.score_mod(site)
        self.on_scores = on_scores(self.score_mod)
        self.restore = seams.score_restore(site)
        self.rotate = nn.Identity() if rotate is None else rotate
        self.watch: nn.Module = Unwatched()

    def forward(self, x_BTD: Tensor, mask: Mask = CAUSAL) -> tuple[Tensor, Tensor]:
        B, T, _ = x_BTD.shape
        q = self.wq(x_BTD).view(B, T, self.n_heads, self.head_dim)
        k = self.wk(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        v = self.wv(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        q, k = self.qk_transform(q, k)
        q = self.attn_scale(q)
        q, k = self.rotate(q), self.rotate(k)
        bound = logit_bound(q.detach(), k.detach(), self.scale * (self.restore or 1.0))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        self.watch(q, k, mask)
        y_BHTK = self._attend(q, k, v, mask)
        return self.wo(y_BHTK.transpose(1, 2).reshape(B, T, -1)), bound

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped = self.n_kv_heads != self.n_heads
        if self.backend == "sdpa":
            return _sdpa(q, k, v, mask, dropout, grouped)
        if self.backend == "sdpa_fp32":
            with torch.autocast(q.device.type, enabled=False):
                return _sdpa(fp32(q), fp32(k), fp32(v), mask, dropout, grouped).to(v.dtype)
        if self.backend == "flex":
            return flex_attention(q, k, v, self.on_scores, grouped, mask.rendered)  # pyright: ignore[reportArgumentType]
        return explicit_attention(q, k, v, self.scale, mask, dropout, self.restore, self.score_mod)

    def extra_repr(self) -> str:
        return f"backend={self.backend}"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float, grouped: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask.rendered,  # pyright: ignore[reportArgumentType]  # a tensor for this back-end
        dropout_p=dropout,
        is_causal=mask.rendered is None and mask.causal,
        enable_gqa=grouped,
    )


def logit_bound(q_BTHK: Tensor, k_BTGK: Tensor, scale: float) -> Tensor:
    """max over heads of scale * max|q| * max|k|: no logit of the layer is larger (Cauchy-Schwarz). O(B T D)."""
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    q_H = torch.linalg.vector_norm(q_BTHK, dim=-1, dtype=dtype).amax((0, 1))
    k_G = torch.linalg.vector_norm(k_BTGK, dim=-1, dtype=dtype).amax((0, 1))
    k_H = k_G if len(k_G) == len(q_H) else k_G.repeat_interleave(len(q_H) // len(k_G))
    return scale * (q_H * k_H).amax()


def explicit_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    scale: float,
    mask: Mask = CAUSAL,
    dropout: float = 0.0,
    restore: float | None = None,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """softmax(mask(score_mod(scale * q k^T))) v with logits and softmax in fp32; dtype of `v`.

    With `restore` the products are formed in fp16 and multiplied by it in fp32. Blocks of queries are recomputed in
    the backward pass, so memory is O(QUERY_BLOCK * S) and not O(T * S).
    """
    k_BHSK, v_BHSK = _spread_kv(k_BGSK, q_BHTK.shape[1]), _spread_kv(v_BGSK, q_BHTK.shape[1])
    T = q_BHTK.shape[2]
    blocks = []
    for start, stop in _query_blocks(T):
        first, last = mask.keys(start, stop, T)
        hidden = mask.hidden(start, stop, first, last, q_BHTK.device)
        block = (q_BHTK[:, :, start:stop], k_BHSK[:, :, first:last], v_BHSK[:, :, first:last])
        args = (*block, hidden, scale, dropout, restore, score_mod)
        if T > QUERY_BLOCK and torch.is_grad_enabled():
            blocks.append(checkpoint(_attend_block, *args, use_reentrant=False))
        else:
            blocks.append(_attend_block(*args))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _attend_block(
    q_BHCK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    hidden: Tensor,
    scale: float,
    dropout: float,
    restore: float | None,
    score_mod: ScoreMod | None,
) -> Tensor:
    with torch.autocast(q_BHCK.device.type, enabled=False):
        logits = _block_logits(q_BHCK, k_BHSK, scale, restore)
        if score_mod is not None:
            logits = score_mod(logits)  # before the mask: a capped -inf would let the future in
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return (weights @ fp32(v_BHSK)).to(v_BHSK.dtype)


def _block_logits(q_BHCK: Tensor, k_BHSK: Tensor, scale: float, restore: float | None) -> Tensor:
    """Scaled logits (B, H, C, S) in fp32."""
    if restore is None:
        return (fp32(q_BHCK) * scale) @ fp32(k_BHSK).transpose(-1, -2)
    return fp32((q_BHCK.half() * scale) @ k_BHSK.half().transpose(-1, -2)) * restore


def _query_blocks(T: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + QUERY_BLOCK, T)) for start in range(0, T, QUERY_BLOCK))


def _spread_kv(x_BGSK: Tensor, n_heads: int) -> Tensor:
    groups = x_BGSK.shape[1]
    return x_BGSK if groups == n_heads else x_BGSK.repeat_interleave(n_heads // groups, dim=1)


@torch.no_grad()
def logit_stats(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    scale: float,
    mask: Mask = CAUSAL,
    restore: float | None = None,
    score_mod: ScoreMod | None = None,
) -> AttentionStats:
    """Exact statistics over all pairs (query, key that it sees), per head.

    Of a `score_mod`, the share of logits in each of its regions, and the share of gradient that passes: its slope,
    averaged with the attention weights, since a logit's gradient is proportional to its weight. Regions without a
    logit pass NaN.
    """
    B, H, T, _ = q_BHTK.shape
    k_BHSK = _spread_kv(k_BGSK, H)
    largest = torch.full((H,), -math.inf, device=q_BHTK.device)
    smallest = torch.full((H,), math.inf, device=q_BHTK.device)
    entropy = torch.zeros(H, device=q_BHTK.device)
    choosing = seen = torch.zeros((), device=q_BHTK.device)
    sums: dict[str, Tensor] = {}
    with torch.autocast(q_BHTK.device.type, enabled=False):
        for start, stop in _query_blocks(T):
            first, last = mask.keys(start, stop, T)
            hidden = mask.hidden(start, stop, first, last, q_BHTK.device)
            logits = _block_logits(q_BHTK[:, :, start:stop], k_BHSK[:, :, first:last], scale, restore)
            smallest = torch.minimum(smallest, logits.masked_fill(hidden, math.inf).amin((0, 2, 3)))
            largest = torch.maximum(largest, logits.masked_fill(hidden, -math.inf).amax((0, 2, 3)))
            scores = logits if score_mod is None else score_mod(logits)
            log_p = scores.masked_fill(hidden, -math.inf).log_softmax(-1)
            p = log_p.exp()
            entropy_BHC = -(p * log_p.masked_fill(hidden, 0.0)).sum(-1)
            # A query that sees one key has nothing to choose from: its entropy and ln 1 are both 0, and it is left out.
            n_keys = (~hidden).sum(-1).expand(B, 1, -1)
            entropy += torch.where(n_keys > 1, entropy_BHC / n_keys.log().clamp_min(1e-9), 0.0).sum((0, 2))
            choosing, seen = choosing + (n_keys > 1).sum(), seen + n_keys.sum()
            if score_mod is not None:
                _add_score_mod(sums, score_mod, logits, p, ~hidden)
    return AttentionStats(
        largest,
        torch.maximum(largest.abs(), smallest.abs()),
        entropy / choosing.clamp_min(1),
        _score_mod_shares(sums, H * seen),
    )


def _add_score_mod(sums: dict[str, Tensor], score_mod: ScoreMod, logits: Tensor, p: Tensor, visible: Tensor) -> None:
    passed = p * score_mod.slope(logits)
    zero = torch.zeros((), device=logits.device)
    for name, region in {"": visible, **score_mod.regions(logits)}.items():
        inside = region & visible
        for key, value in (("count", inside), ("weight", p * inside), ("passed", passed * inside)):
            sums[f"{key}/{name}"] = sums.get(f"{key}/{name}", zero) + value.sum()


def _score_mod_shares(sums: dict[str, Tensor], n_logits: Tensor) -> dict[str, Tensor]:
    shares = {}
    for name in [key.partition("/")[2] for key in sums if key.startswith("count/")]:
        passing = sums[f"passed/{name}"] / sums[f"weight/{name}"]
        if name:
            shares |= {f"share/{name}": sums[f"count/{name}"] / n_logits, f"pass/{name}": passing}
        else:
            shares["pass"] = passing
    return shares
