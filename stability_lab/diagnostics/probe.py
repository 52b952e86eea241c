"""Measurements on fixed batches, without gradients: validation loss, exact attention-logit statistics, and how large
the residual stream, the embeddings and the gains of queries and keys are.

Neither touches the training's random numbers: dropout is off and the windows are fixed. Shape letters: M windows,
T tokens, D d_model, H heads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from stability_lab.model.attention import Attention, AttentionStats, logit_stats
from stability_lab.model.block import Block
from stability_lab.model.mask import Mask
from stability_lab.model.transformer import GPT
from stability_lab.numerics import fp32
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.objective import VALIDATION, Objective


@torch.no_grad()
def validate(model: GPT, objective: Objective, windows: Tensor, batch_size: int, n_bytes: int) -> dict[str, float]:
    """Metrics of the objective over `windows` (M, T+1), whose targets stand for `n_bytes` bytes of text.

    No auxiliary term is in them. Sums are kept in fp64: nothing depends on `batch_size` beyond rounding in the model.
    """
    total = torch.zeros((), dtype=torch.float64, device=windows.device)
    n = torch.zeros((), dtype=torch.int64, device=windows.device)
    one = torch.ones((), device=windows.device)
    columns = objective.traits.columns
    measured = torch.zeros(len(columns), dtype=torch.float64, device=windows.device)
    with evaluating(model):
        for start in range(0, len(windows), batch_size):
            batch = objective.batch(windows[start : start + batch_size], VALIDATION + start)
            sums = objective.loss(model(batch.inputs_MT, batch.segments_MT), batch, one)
            total += sums.ce.double()
            n += (batch.targets_MT != IGNORE).sum()
            if columns:
                measured += torch.stack(sums.measured).double()
    besides = {f"val/{name}": value / len(windows) for name, value in zip(columns, measured.tolist(), strict=True)}
    return objective.metrics(total.item(), int(n.item()), n_bytes) | besides


@torch.no_grad()
def probe_attention(model: GPT, objective: Objective, windows: Tensor) -> dict[str, float]:
    """Exact attention statistics over all logits of `windows` (P, T+1), of the model and of each layer, and sizes.

    Largest logit, signed and absolute, before any cap; `spread`, the largest over layers of a layer's largest logit
    minus the median of its heads' (do single heads dominate?); mean normalised entropy; what a `score_mod` does. Root
    mean squares of the residual stream after each block and of the token embeddings; where queries and keys have
    gains, the largest product of two over layers.
    """
    with evaluating(model), watching(model) as (stats, rms_L):
        batch = objective.batch(windows, VALIDATION)
        model(batch.inputs_MT, batch.segments_MT)
    spread_L = torch.stack([s.max_logit_H.amax() - s.max_logit_H.median() for s in stats]).tolist()
    largest_L = torch.stack([s.max_logit_H.amax() for s in stats]).tolist()
    absolute_L = torch.stack([s.max_abs_logit_H.amax() for s in stats]).tolist()
    entropy_L = torch.stack([s.entropy_H.mean() for s in stats]).tolist()
    measured = {
        "attn/max_logit": _max(largest_L),
        "attn/max_abs_logit": _max(absolute_L),
        "attn/max_logit_spread": _max(spread_L),
        "attn/entropy": sum(entropy_L) / len(entropy_L),
    }
    for key in stats[0].score_mod:
        values = torch.stack([s.score_mod[key] for s in stats])
        measured[f"attn/score_mod/{key}"] = values.nanmean().item()
    for layer, (logit, entropy) in enumerate(zip(largest_L, entropy_L, strict=True)):
        measured[f"attn/max_logit/L{layer:02d}"] = logit
        measured[f"attn/entropy/L{layer:02d}"] = entropy
    measured["weight/rms/embed"] = fp32(model.embed.weight[: model.config.vocab_size]).square().mean().sqrt().item()
    for layer, rms in enumerate(rms_L):
        measured[f"act/rms/L{layer:02d}"] = rms.item()
    attentions = [attention for attention in model.modules() if isinstance(attention, Attention)]
    gains = [gain.item() for a in attentions if (gain := a.qk_transform.gain_product()) is not None]
    if gains:
        measured["attn/qk_gain"] = _max(gains)
    for layer, attention in enumerate(attentions):
        if (factor := attention.attn_scale.factor) is not None:
            measured[f"attn/scale/L{layer:02d}"] = factor.item()
    return measured


class _Watch(torch.nn.Module):
    """Takes the place of a layer's `watch`: exact statistics of its logits, one entry a forward pass."""

    def __init__(self, attention: Attention, stats: list[AttentionStats]):
        super().__init__()
        self.scale, self.restore, self.score_mod = attention.scale, attention.restore, attention.score_mod
        self.stats = stats

    def forward(self, q_BHTK: Tensor, k_BGTK: Tensor, mask: Mask) -> None:
        self.stats.append(logit_stats(q_BHTK, k_BGTK, self.scale, mask, self.restore, self.score_mod))


@contextmanager
def watching(model: torch.nn.Module) -> Iterator[tuple[list[AttentionStats], list[Tensor]]]:
    """Of a forward pass meanwhile, a layer each: attention statistics (O(T^2) in fp32), and the root mean square of the
    residual stream (B, T, D) after the block."""
    stats: list[AttentionStats] = []
    rms: list[Tensor] = []

    def note(_: torch.nn.Module, __: object, output: tuple[Tensor, Tensor]) -> None:
        rms.append(fp32(output[0]).square().mean().sqrt())

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    unwatched = [attention.watch for attention in attentions]
    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, Block)]
    for attention in attentions:
        attention.watch = _Watch(attention, stats)
    try:
        yield stats, rms
    finally:
        for attention, before in zip(attentions, unwatched, strict=True):
            attention.watch = before
        for hook in hooks:
            hook.remove()


def _max(values: list[float]) -> float:
    """Python's max hides a NaN that is not the first value."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    # A compiled model would be compiled a second time for this, and measured by another kernel than an eager one. Where
    # the compiler was never loaded, nothing is compiled, and to ask it would load it.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager:
            yield
    finally:
        model.train(was_training)
