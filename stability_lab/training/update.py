"""The update of one step: any torch optimizer, in a form that can be called off without asking the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, _foreach_div_, nn  # pyright: ignore[reportPrivateImportUsage]

from stability_lab.config import ConfigError


class Update(Protocol):
    """What the training step asks of an optimizer."""

    parameters: list[nn.Parameter]  # all that are trained

    def step(self, lr: float, grad_divisor: Tensor, call_off: Tensor) -> None:
        """One update at the peak's schedule value `lr`, with gradients divided by `grad_divisor`.

        Both tensors are 0-d fp32 on the parameters' device. Weights, state and step count keep their bits where
        `call_off` is 1.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """All that an update leaves behind beside the weights, by name."""
        ...

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `state`; ValueError where a tensor is missing or of another shape."""
        ...


class TorchOptimizer(Protocol):
    """What is used of a `torch.optim.Optimizer`."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Any, Any]: ...

    def step(self) -> Any: ...


class TorchUpdate:
    """State, names and learning rates of one or more torch optimizers that share the parameters of a model.

    A group whose `lr` differs from the peak `lr` keeps that factor for the whole run. `fields` names the state of a
    parameter where it is known beforehand.
    """

    def __init__(
        self,
        optimizers: Sequence[TorchOptimizer],
        model: nn.Module,
        lr: float,
        fields: Collection[str] | None = None,
    ):
        self.fields = fields
        self.optimizers = list(optimizers)
        self.groups: list[dict[str, Any]] = [group for one in self.optimizers for group in one.param_groups]
        self.factors = [group["lr"] / lr for group in self.groups]
        self.parameters = [p for group in self.groups for p in group["params"]]
        self.named = dict(model.named_parameters())
        if {id(p) for p in self.parameters} != {id(p) for p in self.named.values() if p.requires_grad}:
            raise ValueError("an optimizer must hold every parameter that is trained, and no other")

    def set_lr(self, lr: float) -> None:
        for group, factor in zip(self.groups, self.factors, strict=True):
            group["lr"] = lr * factor

    def state(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": value
            for name, parameter in self.named.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            field, _, name = key.partition("/")
            parameter = self.named.get(name)
            if parameter is None or not _fits(value, parameter):
                raise ValueError(f"optimizer/{key} fits no parameter of this model")
            state.setdefault(parameter, {})[field] = value.to(parameter.device).clone()
        for optimizer in self.optimizers:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            # Factored moments of a matrix have other names than those of a vector.
            kinds = {(p.ndim, tuple(sorted(fields))) for p, fields in state.items() if p in own}
            if len(kinds) > len({ndim for ndim, _ in kinds}):
                raise ValueError(f"the optimizer's state is not the same for all parameters: {sorted(kinds)}")
            if self.fields is not None and any(set(names) != set(self.fields) for _, names in kinds):
                raise ValueError(f"the optimizer's state is {sorted(kinds)} and must be {sorted(self.fields)}")
            optimizer.state.clear()
            optimizer.state.update({p: fields for p, fields in state.items() if p in own})


class FusedUpdate(TorchUpdate):
    """An optimizer whose fused kernel reads `grad_scale` and `found_inf` on the device (AdamW, Adam, SGD).

    The kernel takes them the way GradScaler hands them over, so clipping costs no pass over the gradients.
    """

    def step(self, lr: float, grad_divisor: Tensor, call_off: Tensor) -> None:
        self.set_lr(lr)
        for optimizer in self.optimizers:
            optimizer.grad_scale, optimizer.found_inf = grad_divisor, call_off  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()


class SnapshotUpdate(TorchUpdate):
    """Any torch optimizer: gradients are divided in place, and old weights and state are put back on the device.

    This costs a copy of weights and state. An optimizer that counts in Python numbers could not take a step back
    without asking the device, and is refused at its first step.
    """

    first = True  # no step was taken since this object was made

    def step(self, lr: float, grad_divisor: Tensor, call_off: Tensor) -> None:
        # State is made at the first step, when there is none to go back to: only then does the host ask.
        if self.first and call_off.item():
            return
        self.set_lr(lr)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        _foreach_div_(gradients, grad_divisor)
        before = self.state()
        kept = [tensor.detach().clone() for tensor in (*self.parameters, *before.values())]
        numbers = self._numbers() if self.first else {}
        for optimizer in self.optimizers:
            optimizer.step()
        if self.first and (moved := self._numbers()) != numbers:
            raise ConfigError(
                f"optimizer: {type(self.optimizers[0]).__name__} counts in Python numbers "
                f"({', '.join(sorted(moved.keys() - numbers.keys() or moved.keys()))}), so that a step could not be "
                "called off; give it an `Update` of its own"
            )
        self.first = False
        after = self.state()
        keep = call_off > 0
        with torch.no_grad():
            for new, old in zip((*self.parameters, *(after[key] for key in before)), kept, strict=True):
                new.copy_(torch.where(keep.to(new.device), old, new))

    def _numbers(self) -> dict[str, Any]:
        """Python numbers that the optimizers keep between steps."""
        numbers: dict[str, Any] = {}
        for at, group in enumerate(self.groups):
            numbers |= {f"group {at} {k}": v for k, v in group.items() if k != "lr" and isinstance(v, int | float)}
        for optimizer in self.optimizers:
            for name, parameter in self.named.items():
                fields = optimizer.state.get(parameter, {})
                numbers |= {f"{k} of {name}": v for k, v in fields.items() if isinstance(v, int | float)}
        return numbers


def _fits(value: Tensor, parameter: nn.Parameter) -> bool:
    """Moments have the parameter's shape; counters are scalars, and factored moments broadcast to it."""
    try:
        return torch.broadcast_shapes(value.shape, parameter.shape) == parameter.shape
    except RuntimeError:
        return False
