"""torch's fused AdamW, called directly: `torch.optim` loads torch's compiler, which takes as long as torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# pyright: reportPrivateImportUsage=false
from torch import _foreach_add_, _foreach_sub_, _fused_adamw_  # isort: skip


class FusedAdamW:
    """Does and keeps, bit for bit, what `torch.optim.AdamW(groups, fused=True)` does and keeps.

    `groups` have `params` and `weight_decay`. `local` gives what this process holds of a weight, gradient or moment.
    `grad_scale` divides the gradients, and where `found_inf` is 1 nothing changes; both are 0-d fp32 on the device.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        local: Callable[[Tensor], Tensor] | None = None,
    ):
        self.local = local or _whole
        self.param_groups: list[dict[str, Any]] = [{**group, "lr": lr, "betas": betas, "eps": eps} for group in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        local = self.local
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] if p in self.state else self._begin(p) for p in parameters]
            steps = [state["step"] for state in states]
            _foreach_add_(steps, 1)
            _fused_adamw_(
                [local(p) for p in parameters],
                [local(p.grad) for p in parameters if p.grad is not None],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            if self.found_inf is not None:
                _foreach_sub_(steps, [self.found_inf] * len(steps))

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        self.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        return self.state[parameter]


def _whole(tensor: Tensor) -> Tensor:
    return tensor
