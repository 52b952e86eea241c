"""Growth of what linear layers give before a run diverges (arXiv:2410.16682): the part `outputs` of `reproduce nvidia`.

    growth = ln(|y| of the run that will diverge / |y| of a run that converges)

|y| is the L2 norm of a layer's outputs for the same validation windows, a mean over tokens, layers and, for `qkv`, the
three projections. Both runs begin with the same weights and see the same batches. One has the rising rate of the part
`ramp`, the other a constant one. They are compared at the last look before the 15 steps whose mean loss leaves `LEVEL`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stability_lab.build import build_run
from stability_lab.config import TrainConfig
from stability_lab.model.transformer import GPT
from stability_lab.reproduction.evidence import FAILING, failing_row

LEVEL = 2.6  # nats
EVERY = 10  # steps between two looks
CONVERGES = 3e-3  # learning rate
LAYERS = {
    "qkv": ("attn.wq", "attn.wk", "attn.wv"),
    "proj": ("attn.wo",),
    "fc1": ("mlp.w_up",),
    "fc2": ("mlp.w_down",),
}


def output_growth(config: TrainConfig, seeds: Iterable[int]) -> dict[str, float | list[float]]:
    """`KIND_diverging` and `KIND_converging`, the logarithms of |y|, and `KIND_growth`, their difference, one a seed.

    `config` has the rising rate. A seed whose run never fails is left out.
    """
    schedule = dataclasses.replace(config.schedule, name="constant")
    calm = dataclasses.replace(config, schedule=schedule, optimizer={**config.optimizer, "lr": CONVERGES})
    found: dict[str, list[float]] = {}
    for seed in seeds:
        losses, diverging = _train(dataclasses.replace(config, seed=seed), config.trainer.max_steps)
        row = failing_row(losses, LEVEL)
        if row is None or row + 1 - FAILING < EVERY:
            continue
        step = (row + 1 - FAILING) // EVERY * EVERY
        converging = _train(dataclasses.replace(calm, seed=seed), step)[1]
        for kind in LAYERS:
            pair = diverging[step][kind], converging[step][kind]
            found.setdefault(f"{kind}_diverging", []).append(pair[0])
            found.setdefault(f"{kind}_converging", []).append(pair[1])
            found.setdefault(f"{kind}_growth", []).append(pair[0] - pair[1])
    return dict(found)


def _train(config: TrainConfig, steps: int) -> tuple[np.ndarray, dict[int, dict[str, float]]]:
    """The losses of the first steps, and the logarithms of |y| every few steps."""
    run = build_run(config)
    n, losses, sizes = config.trainer.micro_batch_size, [], {}
    for step in range(1, steps + 1):
        first = (step - 1) * n
        batch = run.objective.batch(torch.from_numpy(run.sampler.batch(first, n)), first)
        losses.append(run.step(batch, run.schedule.lr(step))[0].item())
        if step % EVERY == 0:
            sizes[step] = output_sizes(run.model, run.probe_windows)
    return np.array(losses), sizes


@torch.no_grad()
def output_sizes(model: GPT, windows: Tensor) -> dict[str, float]:
    """Kind of layer -> logarithm of |y| for `windows`, (M, T+1)."""
    norms: dict[str, list[float]] = {kind: [] for kind in LAYERS}

    def note(kind: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, y_BTD: norms[kind].append(y_BTD.double().norm(dim=-1).mean().item())

    hooks = [
        block.get_submodule(path).register_forward_hook(note(kind))
        for block in model.blocks
        for kind, paths in LAYERS.items()
        for path in paths
    ]
    try:
        model(windows[:, :-1])
    finally:
        for hook in hooks:
            hook.remove()
    return {kind: math.log(math.fsum(values) / len(values)) for kind, values in norms.items()}
