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

_masks: dict[tuple[bool, int | None, int, str], torch_flex.BlockMask] = {}


def flex_attention(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    on_scores: Callable[..., Tensor] | None,
    grouped: bool,
    mask: torch_flex.BlockMask,
) -> Tensor:
    """softmax(mask(on_scores(q k^T / sqrt(K)))) v; (B, H, T, K). Backward needs CUDA."""
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


def block_mask(
    causal: bool, window: int | None, documents_BT: Tensor | None, seq_len: int, device: torch.device
) -> torch_flex.BlockMask:
    """`Mask.hidden` as FlexAttention takes it, new for each batch where there are documents.

    Without documents it is made once for a length and device; call it before compiling a model, or making it becomes
    part of the graph.
    """
    key = (causal, window, seq_len, str(device))
    if documents_BT is None and key in _masks:
        return _masks[key]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key if causal else query == query
        if window is not None:
            seen = seen & ((query - key).abs() < window)
        return seen if documents_BT is None else seen & (documents_BT[b, query] == documents_BT[b, key])

    B = None if documents_BT is None else documents_BT.shape[0]
    made = torch_flex.create_block_mask(visible, B, None, seq_len, seq_len, device=str(device))
    if documents_BT is None:
        _masks[key] = made
    return made
