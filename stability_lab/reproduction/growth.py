"""Growth exponents at initialisation (OLMo 2, arXiv:2501.00656, 3.2): the part `growth` of `reproduce olmo2`.

    lambda = 1 / (L - 1) * ln(|v_L| / |v_1|)

v_l is the mean over tokens of the norm of the residual stream after block l of L; for gradients that of the gradient of
the mean cross-entropy there, and ln(|v_1| / |v_L|), because gradients run the other way. 0 keeps the size.

The sign depends on the convention: on width, on the layer that counts as first, and on the rule of depth. This is ours:
the baseline's pre-norm block (LayerNorm, GELU, RoPE), head_dim 64, uniformly drawn bytes as tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stability_lab.build import build_model
from stability_lab.config import InitConfig, TrainConfig
from stability_lab.model.gpt import GPT
from stability_lab.model.init import initialise
from stability_lab.objective.loss import language_model_loss
from stability_lab.seams import Seams

VOCAB = 257
SEQ_LEN = 128
HEAD_DIM = 64
SCHEMES = {
    "normal": InitConfig(scheme="normal", std=0.02, truncate=3.0),
    "scaled": InitConfig(scheme="mitchell", std=0.02, truncate=3.0),  # its std follows from the shapes
}


def growth(
    config: TrainConfig, widths: Iterable[int], layers: int, tokens: int, seeds: Iterable[int]
) -> dict[str, float | list[float]]:
    """`activation_SCHEME_WIDTH` and `gradient_SCHEME_WIDTH`, one exponent a seed, and their absolute values as
    `abs_...`. `config` gives all that is not the shape, on whose device it runs."""
    found: dict[str, float | list[float]] = {}
    seeds = list(seeds)
    for width in widths:
        for name, init in SCHEMES.items():
            model = dataclasses.replace(
                config.model,
                d_model=width,
                n_layers=layers,
                n_heads=max(1, width // HEAD_DIM),
                d_ff=None,
                seq_len=SEQ_LEN,
                vocab_size=VOCAB,
                init=init,
            )
            pairs = [exponents(dataclasses.replace(config, model=model), seed, tokens) for seed in seeds]
            for kind, values in zip(("activation", "gradient"), zip(*pairs, strict=True), strict=True):
                found[f"{kind}_{name}_{width}"] = list(values)
                found[f"abs_{kind}_{name}_{width}"] = [abs(value) for value in values]
    return found


def exponents(config: TrainConfig, seed: int, tokens: int) -> tuple[float, float]:
    """(of activations, of gradients) of one model with weights of `seed`, over about `tokens` tokens."""
    model = build_model(config, VOCAB, Seams())
    initialise(model, seed)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(256, (max(1, tokens // SEQ_LEN), SEQ_LEN + 1), generator=generator)
    streams_L = _streams(model, windows)
    first, last = streams_L[0], streams_L[-1]
    assert first.grad is not None
    assert last.grad is not None
    depth = len(streams_L) - 1
    return (
        math.log(_size(last) / _size(first)) / depth,
        math.log(_size(first.grad) / _size(last.grad)) / depth,
    )


def _streams(model: GPT, windows: Tensor) -> list[Tensor]:
    """The residual stream (B, T, D) after each block, with the gradients of the mean loss."""
    streams: list[Tensor] = []

    def keep(_: torch.nn.Module, __: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        stream = output[0]
        if not streams:  # where the graph begins: no weight needs a gradient
            stream = stream.detach().requires_grad_()
        stream.retain_grad()
        streams.append(stream)
        return stream, output[1]

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        logits = model(windows[:, :-1]).logits_BTV
    finally:
        for hook in hooks:
            hook.remove()
    targets = windows[:, 1:].flatten()
    language_model_loss(logits.flatten(0, 1), targets, torch.tensor(1 / targets.numel())).objective.backward()
    return streams


def _size(x_BTD: Tensor) -> float:
    return x_BTD.detach().double().norm(dim=-1).mean().item()
