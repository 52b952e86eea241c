"""Causal self-attention with grouped keys and values, and the ways to compute it.

Back-ends are chosen once, before the model is built. `sdpa` is torch's fused kernel. `explicit` forms the logits in
fp32, a block of queries at a time: the reference for tests, the path of the probe (fused kernels do not give the
logits away) and, on CPU, that of stabilizers that act on single logits. `flex` is compiled FlexAttention on CUDA.

Shape letters: B batch, T query tokens, S key tokens, D d_model, H heads, G key/value heads, K head_dim, C a block
of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stability_lab.config import ConfigError, ModelConfig
from stability_lab.model.documents import Documents, same_document
from stability_lab.model.flex import flex_attention, on_scores
from stability_lab.model.rope import rotate
from stability_lab.numerics import fp32
from stability_lab.seams import AttentionShape, ScoreMod, Seams

FLEX_MIN_HEAD_DIM = 16  # of its kernel
QUERY_BLOCK = 256  # rows of logits that the explicit path holds at once


class Backend(NamedTuple):
    name: str
    reason: str


def choose_backend(
    requested: str,
    seams: Seams,
    device_type: str = "cpu",
    precision: str = "fp32",
    dropout: float = 0.0,
    head_dim: int = 64,
    documents: bool = False,
) -> Backend:
    """The back-end of every layer and why; both go to the log and the manifest.

    ConfigError where what was asked for cannot honour a stabilizer: none is ever dropped.
    """
    for_logits = seams.owners.get("score_mod", ())
    restored = seams.owners.get("score_restore", ())
    if restored:
        if precision != "fp16":
            raise ConfigError(
                f"trainer.precision={precision}: stabilizer {restored[0]} with mode=query_key_layer changes only "
                f"rounding unless logits are formed in fp16; use trainer.precision=fp16 or another mode"
            )
        if requested not in ("auto", "explicit"):
            raise ConfigError(
                f"model.attention={requested}: stabilizer {restored[0]} with mode=query_key_layer needs explicit "
                f"logits; use model.attention=auto"
            )
        return Backend("explicit", f"{restored[0]} forms logits in fp16")
    if requested == "flex" and device_type == "cpu":
        raise ConfigError(
            "model.attention=flex: FlexAttention has no backward pass on CPU; use auto, sdpa or explicit there"
        )
    unfit = ""
    if dropout:
        unfit = f"FlexAttention has no dropout (model.dropout={dropout:g})"
    elif head_dim < FLEX_MIN_HEAD_DIM:
        unfit = f"FlexAttention needs a head_dim of {FLEX_MIN_HEAD_DIM} or more (here {head_dim})"
    if requested == "flex" and unfit:
        raise ConfigError(f"model.attention=flex: {unfit}; use model.attention=auto")
    if requested == "sdpa" and for_logits:
        raise ConfigError(
            f"model.attention=sdpa: fused attention cannot apply stabilizer {for_logits[0]}; use model.attention=auto"
        )
    if requested != "auto":
        return Backend(requested, f"model.attention={requested}")
    if documents and not for_logits and device_type == "cuda" and not unfit:
        return Backend("flex", "sampling.mask_documents: it skips what lies in other documents")
    if not for_logits:
        return Backend("sdpa", "no stabilizer acts on single attention logits")
    if device_type == "cuda" and unfit:
        return Backend("explicit", f"{for_logits[0]} acts on single attention logits, and {unfit}")
    if device_type == "cuda":
        return Backend("flex", f"{for_logits[0]} acts on single attention logits, which no other fused kernel allows")
    return Backend("explicit", f"{for_logits[0]} acts on single attention logits, and there is no fused kernel on CPU")


class AttentionStats(NamedTuple):
    """Exact statistics of one layer's logits, after scaling and before `score_mod` and mask; fp32."""

    max_logit_H: Tensor  # signed
    max_abs_logit_H: Tensor
    entropy_H: Tensor  # mean over queries of entropy / ln(number of keys), the first query left out
    score_mod: dict[str, Tensor]  # 0-d: "share/REGION" and "pass/REGION" of `score_mod`'s regions, "pass" of all


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
        shape = AttentionShape(layer, config.n_layers, h, g, self.head_dim)
        self.qk_transform = seams.qk_transform(shape)
        self.attn_scale = seams.attn_scale(shape)
        self.score_mod = seams.score_mod
        self.on_scores = on_scores(seams.score_mod)
        self.restore = None if seams.score_restore is None else seams.score_restore(shape)

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        stats: list[AttentionStats] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`stats`, where given, receives this layer's exact statistics (a probe; costs O(T^2) in fp32)."""
        B, T, _ = x_BTD.shape
        q = self.wq(x_BTD).view(B, T, self.n_heads, self.head_dim)
        k = self.wk(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        v = self.wv(x_BTD).view(B, T, self.n_kv_heads, self.head_dim)
        q, k = self.qk_transform(q, k)
        q = self.attn_scale(q)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        bound = logit_bound(q.detach(), k.detach(), self.scale * (self.restore or 1.0))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if stats is not None:
            numbers = None if documents is None else documents.number_BT
            stats.append(logit_stats(q, k, self.scale, self.restore, self.score_mod, numbers))
        y_BHTK = self._attend(q, k, v, documents)
        return self.wo(y_BHTK.transpose(1, 2).reshape(B, T, -1)), bound

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped = self.n_kv_heads != self.n_heads
        mask: Any = None if documents is None else documents.mask
        if self.backend == "sdpa":
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
            )
        if self.backend == "flex":
            return flex_attention(q, k, v, self.on_scores, grouped, mask)
        numbers = None if documents is None else documents.number_BT
        return explicit_attention(q, k, v, self.scale, dropout, self.restore, self.score_mod, numbers)

    def extra_repr(self) -> str:
        return f"backend={self.backend}"


def logit_bound(q_BTHK: Tensor, k_BTGK: Tensor, scale: float) -> Tensor:
    """max over heads of scale * max|q| * max|k|: no logit of the layer is larger (Cauchy-Schwarz). O(B T D)."""
    q_H = fp32(q_BTHK).square().sum(-1).amax((0, 1))
    k_G = fp32(k_BTGK).square().sum(-1).amax((0, 1))
    k_H = k_G if len(k_G) == len(q_H) else k_G.repeat_interleave(len(q_H) // len(k_G))
    return scale * (q_H * k_H).amax().sqrt()


def explicit_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    scale: float,
    dropout: float = 0.0,
    restore: float | None = None,
    score_mod: ScoreMod | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """softmax(mask(score_mod(scale * q k^T))) v with logits and softmax in fp32; dtype of `v`.

    The mask hides the future and, where `documents_BT` numbers them, other documents.
    With `restore` the products are formed in fp16 and multiplied by it in fp32. Blocks of queries are recomputed in
    the backward pass, so memory is O(QUERY_BLOCK * S) and not O(T * S).
    """
    k_BHSK, v_BHSK = _spread_kv(k_BGSK, q_BHTK.shape[1]), _spread_kv(v_BGSK, q_BHTK.shape[1])
    T = q_BHTK.shape[2]
    blocks = []
    for start, stop in _query_blocks(T):
        block = (q_BHTK[:, :, start:stop], k_BHSK[:, :, :stop], v_BHSK[:, :, :stop])
        args = (*block, scale, start, dropout, restore, score_mod, documents_BT)
        if T > QUERY_BLOCK and torch.is_grad_enabled():
            blocks.append(checkpoint(_attend_block, *args, use_reentrant=False))
        else:
            blocks.append(_attend_block(*args))
    return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]


def _attend_block(
    q_BHCK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    scale: float,
    start: int,
    dropout: float,
    restore: float | None,
    score_mod: ScoreMod | None,
    documents_BT: Tensor | None,
) -> Tensor:
    with torch.autocast(q_BHCK.device.type, enabled=False):
        logits, hidden = _block_logits(q_BHCK, k_BHSK, scale, start, restore, documents_BT)
        if score_mod is not None:
            logits = score_mod(logits)  # before the mask: a capped -inf would let the future in
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return (weights @ fp32(v_BHSK)).to(v_BHSK.dtype)


def _block_logits(
    q_BHCK: Tensor,
    k_BHSK: Tensor,
    scale: float,
    start: int,
    restore: float | None,
    documents_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scaled logits (B, H, C, S) in fp32 of the queries from `start` on, and the mask of keys that they do not see.

    The mask is (C, S), of keys in the future, or (B, 1, C, S) where those in other documents are hidden too.
    """
    if restore is None:
        logits = (fp32(q_BHCK) * scale) @ fp32(k_BHSK).transpose(-1, -2)
    else:
        logits = fp32((q_BHCK.half() * scale) @ k_BHSK.half().transpose(-1, -2)) * restore
    c, s = logits.shape[-2:]
    query = torch.arange(start, start + c, device=logits.device)
    future = torch.arange(s, device=logits.device) > query[:, None]
    if documents_BT is None:
        return logits, future
    return logits, (future | ~same_document(documents_BT[:, start : start + c], documents_BT[:, :s]))[:, None]


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
    restore: float | None = None,
    score_mod: ScoreMod | None = None,
    documents_BT: Tensor | None = None,
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
            logits, hidden = _block_logits(
                q_BHTK[:, :, start:stop], k_BHSK[:, :, :stop], scale, start, restore, documents_BT
            )
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
