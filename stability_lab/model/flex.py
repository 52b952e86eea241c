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


def flex_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, score_mod: ScoreMod | None, grouped: bool) -> Tensor:
    """softmax(mask(score_mod(q k^T / sqrt(K)))) v; (B, H, T, K). The model must be on CUDA for a backward pass."""
    mask = causal_mask(q_BHTK.shape[2], q_BHTK.device)
    attend = torch_flex.flex_attention if torch.compiler.is_compiling() else _compiled()
    return attend(
        q_BHTK,
        k_BGTK,
        v_BGTK,
        score_mod=None if score_mod is None else _on_scores(score_mod),
        block_mask=mask,
        enable_gqa=grouped,
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Past its recompile limit torch would fall back to an unfused kernel without a word.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(torch_flex.flex_attention, dynamic=False)


@functools.cache
def _on_scores(score_mod: ScoreMod) -> Callable[..., Tensor]:
    """One closure a score_mod: every layer passes the same object, so one compilation serves all."""

    def on_scores(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score_mod(score)

    return on_scores


@functools.cache
def causal_mask(seq_len: int, device: torch.device) -> torch_flex.BlockMask:
    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return torch_flex.create_block_mask(causal, None, None, seq_len, seq_len, device=str(device))
