"""AdamW with an explicit rule for what decays, and an update that can be called off without asking the device."""

from __future__ import annotations

import torch
from torch import nn

from stability_lab.config import OptimizerConfig


def parameter_groups(model: nn.Module, decay_embeddings: bool = False) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """`decay`: matrices of linear layers. `no_decay`: embeddings (a tied head is one) unless `decay_embeddings`,
    biases, gains, temperatures.

    The rule goes by the kind of module and not by the number of dimensions, so that a gain of shape (H, 1, K) is
    not decayed by mistake. Every trainable parameter is in exactly one group.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    decaying = matrices | embeddings if decay_embeddings else matrices - embeddings
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        groups["decay" if id(parameter) in decaying else "no_decay"].append((name, parameter))
    return groups


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW (arXiv:1711.05101).

    `lr_scaled`: a step shrinks a matrix by lr * weight_decay, as torch does. `independent`: by
    independent_weight_decay times the schedule's factor in [0, 1], whatever the peak learning rate (arXiv:2309.14322,
    3.2.2).
    """
    decay = config.weight_decay
    if config.weight_decay_mode == "independent":
        decay = config.independent_weight_decay / config.lr
    groups = parameter_groups(model, config.decay_embeddings)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in groups["decay"]], "weight_decay": decay},
            {"params": [p for _, p in groups["no_decay"]], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def guarded_step(optimizer: torch.optim.AdamW, lr: float, grad_divisor: torch.Tensor, call_off: torch.Tensor) -> None:
    """One update with gradients divided by `grad_divisor`; nothing at all changes where `call_off` is 1.

    Both are 0-d fp32 tensors on the parameters' device. torch's fused kernel reads them there (the way GradScaler
    hands them over), so that clipping costs no pass over the gradients and a bad step no host synchronisation.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale, optimizer.found_inf = grad_divisor, call_off  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
