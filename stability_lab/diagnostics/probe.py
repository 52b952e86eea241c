"""Measurements on fixed batches, without gradients: validation loss, exact attention-logit statistics, and how large
the residual stream, the embeddings and the gains of queries and keys are.

Neither touches the training's random numbers: dropout is off and the windows are fixed. Shape letters: M windows,
T tokens, D d_model, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stability_lab.judge.series import perplexity
from stability_lab.model.attention import AttentionStats
from stability_lab.model.transformer import GPT
from stability_lab.numerics import fp32
from stability_lab.objective.loss import language_model_loss


@torch.no_grad()
def validate(model: GPT, windows: Tensor, batch_size: int, n_bytes: int) -> dict[str, float]:
    """Loss over `windows` (M, T+1), whose targets stand for `n_bytes` bytes of text; no auxiliary term is in it.

    `val/loss` in nats per token, `val/ppl` its exponential, and `val/bits_per_byte`, which is comparable across
    tokenizers and left out where the text is not known (0 bytes). Sums are kept in fp64, so nothing depends on
    `batch_size` beyond rounding in the model.
    """
    total = torch.zeros((), dtype=torch.float64, device=windows.device)
    one = torch.ones((), device=windows.device)
    with evaluating(model):
        for batch in windows.split(batch_size):
            logits = model(batch[:, :-1]).logits_BTV
            total += language_model_loss(logits.flatten(0, 1), batch[:, 1:].flatten(), one).ce.double()
    nats = total.item()
    loss = nats / windows[:, 1:].numel()
    measured = {"val/loss": loss, "val/ppl": perplexity(loss)}
    return measured | ({"val/bits_per_byte": nats / math.log(2) / n_bytes} if n_bytes else {})


@torch.no_grad()
def probe_attention(model: GPT, windows: Tensor) -> dict[str, float]:
    """Exact attention statistics over all logits of `windows` (P, T+1), of the model and of each layer, and sizes.

    Largest logit, signed and absolute, before any cap; `spread`, the largest over layers of a layer's largest logit
    less the median of its heads' (do single heads dominate?); mean normalised entropy; what a `score_mod` does. Root
    mean squares of the residual stream after each block and of the token embeddings; where queries and keys have
    gains, the largest product of two over layers.
    """
    stats: list[AttentionStats] = []
    with evaluating(model), _streams(model) as rms_L:
        model(windows[:, :-1], stats)
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
    if gains := [gain for block in model.blocks if (gain := _gain_product(block)) is not None]:
        measured["attn/qk_gain"] = _max(gains)
    for layer, block in enumerate(model.blocks):
        factor = getattr(block.get_submodule("attn.attn_scale"), "factor", None)
        if factor is not None:
            measured[f"attn/scale/L{layer:02d}"] = factor.item()
    return measured


@contextmanager
def _streams(model: GPT) -> Iterator[list[Tensor]]:
    """Receives the root mean square of the residual stream (B, T, D) after each block, in a forward pass meanwhile."""
    rms: list[Tensor] = []

    def note(_: torch.nn.Module, __: object, output: tuple[Tensor, Tensor]) -> None:
        rms.append(fp32(output[0]).square().mean().sqrt())

    hooks = [block.register_forward_hook(note) for block in model.blocks]
    try:
        yield rms
    finally:
        for hook in hooks:
            hook.remove()


def _gain_product(block: torch.nn.Module) -> float | None:
    """max|g_q| max|g_k|, by which a logit's bound of sqrt(head_dim) grows (scope `head`)."""
    transform = block.get_submodule("attn.qk_transform")
    q_gain, k_gain = getattr(transform, "q_gain", None), getattr(transform, "k_gain", None)
    if not isinstance(q_gain, Tensor) or not isinstance(k_gain, Tensor):
        return None
    return (q_gain.abs().amax() * k_gain.abs().amax()).item()


def _max(values: list[float]) -> float:
    """Python's max hides a NaN that is not the first value."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        # A compiled model would be compiled a second time for this, and measured by another kernel than an eager one.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
