"""Compiled FlexAttention (arXiv:2412.05496): fused attention on CUDA that applies a function to single logits.

Shape letters: B batch, H heads, G key/value heads, T tokens, K head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from stability_lab.seams import ScoreMod

_masks: dict[tuple[int, str], torch_flex.BlockMask] = {}


def flex_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    on_scores: Callable[..., Tensor] | None,
    grouped: bool,
    mask: torch_flex.BlockMask | None = None,
) -> Tensor:
    """softmax(mask(on_scores(q k^T / sqrt(K)))) v, causal unless told otherwise; (B, H, T, K). Backward needs CUDA."""
    mask = causal_mask(q_BHTK.shape[2], q_BHTK.device) if mask is None else mask
    attend = torch_flex.flex_attention if torch.compiler.is_compiling() else _compiled()
    return attend(q_BHTK, k_BGTK, v_BGTK, score_mod=on_scores, block_mask=mask, enable_gqa=grouped)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Past its recompile limit torch would fall back to an unfused kernel without a word. Each shape of a sweep is one
    # compilation, so the limit is not torch's 8.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(torch_flex.flex_attention, dynamic=False)


@functools.cache
def on_scores(score_mod: ScoreMod | None) -> Callable[..., Tensor] | None:
    """`score_mod` as FlexAttention calls it. Every layer gets the same object, so one compilation serves all."""
    if score_mod is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score_mod(score)

    return modified


def causal_mask(seq_len: int, device: torch.device) -> torch_flex.BlockMask:
    """Made once for a length and device; call it before compiling a model, or the mask becomes part of the graph."""
    key = (seq_len, str(device))
    if key not in _masks:
        _masks[key] = torch_flex.create_block_mask(_causal, None, None, seq_len, seq_len, device=str(device))
    return _masks[key]


def document_mask(number_BT: Tensor) -> torch_flex.BlockMask:
    """Causal, and within documents: query and key see each other where their numbers are equal. New for each batch."""

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (number_BT[b, query] == number_BT[b, key])

    B, T = number_BT.shape
    return torch_flex.create_block_mask(visible, B, None, T, T, device=str(number_BT.device))


def _causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
