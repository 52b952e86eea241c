"""Growth exponents at initialisation (OLMo 2, arXiv:2501.00656, 3.2): the part `growth` of `reproduce olmo2`.

    lambda = 1 / (L - 1) * ln(|v_L| / |v_1|)

v_l is the mean over tokens of the norm of the residual stream after block l of L; for gradients that of the gradient of
the mean cross-entropy there, and ln(|v_1| / |v_L|), because gradients run the other way. 0 keeps the size.

The sign depends on the convention: on width, on the layer that counts as first, and on the rule of depth. This is ours:
the baseline's pre-norm block (LayerNorm, GELU, RoPE), head_dim 64, uniformly drawn bytes as tokens. The paper says
activation and not of what, so the outputs of the MLP's two layers are measured beside the stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from stability_lab.build import build_model
from stability_lab.config import InitConfig, TrainConfig
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT
from stability_lab.objective.causal_lm import CausalLM
from stability_lab.seams import Seams

VOCAB = 257
SEQ_LEN = 128
HEAD_DIM = 64
PLACES = {"": "", "w_up_": "mlp.w_up", "w_down_": "mlp.w_down"}  # prefix of a name -> module of a block
STREAM = ("activation", "gradient")
SCHEMES = {
    "normal": InitConfig(scheme="normal", std=0.02, truncate=3.0),
    "scaled": InitConfig(scheme="mitchell", std=0.02, truncate=3.0),  # its std follows from the shapes
}


def growth(
    config: TrainConfig, widths: Iterable[int], layers: int, tokens: int, seeds: Iterable[int]
) -> dict[str, float | list[float]]:
    """`activation_SCHEME_WIDTH` and `gradient_SCHEME_WIDTH` of the residual stream, one exponent a seed, and their
    absolute values as `abs_...`; those of the MLP's layers as `w_up_...` and `w_down_...`. `config` gives all that is
    not the shape, on whose device it runs."""
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
            of_seeds = [exponents(dataclasses.replace(config, model=model), seed, tokens) for seed in seeds]
            for kind in of_seeds[0]:
                values = [one[kind] for one in of_seeds]
                found[f"{kind}_{name}_{width}"] = values
                if kind in STREAM:
                    found[f"abs_{kind}_{name}_{width}"] = [abs(value) for value in values]
    return found


def exponents(config: TrainConfig, seed: int, tokens: int) -> dict[str, float]:
    """`activation` and `gradient` of one model with weights of `seed` over about `tokens` tokens, for the residual
    stream and, as `w_up_...` and `w_down_...`, for the outputs of the MLP's layers."""
    model = build_model(config, VOCAB, Seams())
    initialise(model, seed)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(256, (max(1, tokens // SEQ_LEN), SEQ_LEN + 1), generator=generator)
    found: dict[str, float] = {}
    for place, outputs_L in _outputs(model, windows).items():
        first, last = outputs_L[0], outputs_L[-1]
        assert first.grad is not None
        assert last.grad is not None
        depth = len(outputs_L) - 1
        found[f"{place}activation"] = math.log(_size(last) / _size(first)) / depth
        found[f"{place}gradient"] = math.log(_size(first.grad) / _size(last.grad)) / depth
    return found


def _outputs(model: GPT, windows: Tensor) -> dict[str, list[Tensor]]:
    """What every block, w_up and w_down gives, (B, T, D) or (B, T, F) a layer, with gradients of the mean loss."""
    outputs: dict[str, list[Tensor]] = {place: [] for place in PLACES}

    def begin(_: torch.nn.Module, __: object, embedded: Tensor) -> None:
        embedded.requires_grad_()  # where the graph begins: no weight needs a gradient

    def keep(place: str) -> Callable[[torch.nn.Module, object, Tensor | tuple[Tensor, Tensor]], None]:
        def hook(_: torch.nn.Module, __: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
            kept = output[0] if isinstance(output, tuple) else output
            kept.retain_grad()
            outputs[place].append(kept)

        return hook

    hooks = [model.embed.register_forward_hook(begin)]
    for block in model.blocks:
        hooks += [block.get_submodule(path).register_forward_hook(keep(place)) for place, path in PLACES.items()]
    objective = CausalLM()
    batch = objective.batch(windows, 0)
    try:
        output = model(batch.inputs_MT)
    finally:
        for hook in hooks:
            hook.remove()
    objective.loss(output, batch, torch.tensor(1 / batch.targets_MT.numel())).objective.backward()
    return outputs


def _size(x_BTD: Tensor) -> float:
    return x_BTD.detach().double().norm(dim=-1).mean().item()
