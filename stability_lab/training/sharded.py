"""torch's FSDP2: weights, gradients and moments are divided among the ranks, and weights gathered for their use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stability_lab.training.ranks import DataParallel


class Sharded(DataParallel):
    """Each block is gathered and divided again by itself, what is outside of the blocks together."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        self._wrapped = fully_shard(model)
        return model

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        self._wrapped.set_requires_gradient_sync(last)
        return nullcontext()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = super().norm([self.local(gradient) for gradient in gradients])
        (square,) = self.sums([own.double().square()])  # in fp32 it would overflow early
        return square.sqrt().to(own.dtype)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}

    def divided(self, tensor: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
