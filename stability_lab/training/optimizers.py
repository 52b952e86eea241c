"""Optimizers: options, what decays, and the `Update` that they build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stability_lab.config import option
from stability_lab.training.fused_adamw import FusedAdamW
from stability_lab.training.update import FusedUpdate, SnapshotUpdate, Update


@runtime_checkable
class OptimizerOptions(Protocol):
    """A frozen dataclass of options. `state_bytes`: of optimizer state for each parameter, at most."""

    name: ClassVar[str]
    state_bytes: ClassVar[int]
    lr: float  # the peak of the schedule

    def build(self, model: nn.Module) -> Update: ...


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


def decay_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool) -> list[dict[str, object]]:
    """`parameter_groups` as torch's optimizers take them."""
    groups = parameter_groups(model, decay_embeddings)
    return [
        {"params": [p for _, p in groups["decay"]], "weight_decay": weight_decay},
        {"params": [p for _, p in groups["no_decay"]], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class AdamW:
    """Fused AdamW (arXiv:1711.05101).

    `weight_decay_mode` lr_scaled: a step shrinks a matrix by lr * weight_decay, as torch does. `independent`: by
    independent_weight_decay times the schedule's factor in [0, 1], whatever the peak learning rate (arXiv:2309.14322,
    3.2.2).
    """

    name: ClassVar[str] = "adamw"
    state_bytes: ClassVar[int] = 8

    lr: float = option(3e-3, gt=0)
    beta1: float = option(0.9, ge=0, lt=1)
    beta2: float = option(0.95, ge=0, lt=1)
    eps: float = option(1e-8, gt=0)
    weight_decay: float = option(0.1, ge=0)
    weight_decay_mode: str = option("lr_scaled", one_of=("lr_scaled", "independent"))
    independent_weight_decay: float = option(1e-4, ge=0)
    decay_embeddings: bool = False

    def build(self, model: nn.Module, fused: bool = True, local: Callable[[Tensor], Tensor] | None = None) -> Update:
        """Not `fused`: torch's own loop over the parameters, which leaves the same state. `local`: see `FusedAdamW`."""
        decay = self.weight_decay
        if self.weight_decay_mode == "independent":
            decay = self.independent_weight_decay / self.lr
        groups = decay_groups(model, decay, self.decay_embeddings)
        betas, fields = (self.beta1, self.beta2), ("step", "exp_avg", "exp_avg_sq")
        if fused:
            return FusedUpdate([FusedAdamW(groups, self.lr, betas, self.eps, local)], model, self.lr, fields)
        made = torch.optim.AdamW(groups, lr=self.lr, betas=betas, eps=self.eps, foreach=False)
        return SnapshotUpdate([made], model, self.lr, fields)


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum. torch's decay is lr * weight_decay, and passes through the momentum."""

    name: ClassVar[str] = "sgd"
    state_bytes: ClassVar[int] = 4

    lr: float = option(0.1, gt=0)
    momentum: float = option(0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = option(0.0, ge=0)
    decay_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError(f"nesterov={self.nesterov}: needs a momentum above 0")

    def build(self, model: nn.Module) -> Update:
        groups = decay_groups(model, self.weight_decay, self.decay_embeddings)
        made = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)
        return SnapshotUpdate([made], model, self.lr)
