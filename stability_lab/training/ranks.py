"""One run in one process or in several: whose samples are whose, and what all of them add up, wait for and agree on.

Every rank holds the whole model and takes an equal part of each step's samples, so a step computes what one process
would, to rounding. Decisions that follow from rows need no agreement, since rows are sums over all ranks; what a clock,
a signal or a disk decides is agreed upon.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, _foreach_norm, nn  # pyright: ignore[reportPrivateImportUsage]

from stability_lab.training.launched import launched

# Buffers are tables that all ranks make alike; torch 2.13 has another word for not sending them about.
_BUFFERS = "forward_sync_buffers"
if _BUFFERS not in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters:
    _BUFFERS = "broadcast_buffers"
# A step waits this long for the slowest rank, which may be writing a checkpoint; a rank that dies is noticed at once.
PATIENCE = timedelta(minutes=30)


class Ranks(Protocol):
    rank: int
    size: int

    def part(self, n: int) -> slice:
        """Which of the `n` samples of a step are this rank's."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to call in training: gradients of its parameters become means over ranks."""
        ...

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; ranks exchange gradients in the `last` of a step."""
        ...

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        """0-d tensors -> their sums over ranks, on the device."""
        ...

    def largest(self, value: Tensor) -> Tensor:
        """Largest over ranks, element by element, on the device."""
        ...

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all gradients, 0-d, on the device."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a weight, gradient or moment."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors undivided; all ranks wait for each other."""
        ...

    def divided(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The opposite: `tensor`, which all ranks have, held as `like` is."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; all ranks wait for each other."""
        ...

    def told(self, value: Any) -> Any:
        """The value that rank 0 gives; all ranks wait for it."""
        ...


class OneProcess:
    """The null object: everything is its own, and nobody is asked."""

    rank, size = 0, 1

    def part(self, n: int) -> slice:
        return slice(0, n)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        del last
        return nullcontext()

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)

    def largest(self, value: Tensor) -> Tensor:
        return value

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack(_foreach_norm(list(gradients))).norm()

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def divided(self, tensor: Tensor, like: Tensor) -> Tensor:
        del like
        return tensor

    def any(self, flag: bool) -> bool:
        return flag

    def told(self, value: Any) -> Any:
        return value


ONE = OneProcess()


class DataParallel(OneProcess):
    """torch's DistributedDataParallel over the default process group."""

    def __init__(self, rank: int, size: int, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self._wrapped: Any = None

    def part(self, n: int) -> slice:
        each = n // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def wrap(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {_BUFFERS: False}
        self._wrapped = nn.parallel.DistributedDataParallel(model, **options)
        return self._wrapped

    def backward(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._wrapped.no_sync()

    def sums(self, values: Sequence[Tensor]) -> list[Tensor]:
        together = torch.stack(list(values))
        dist.all_reduce(together)
        return list(together.unbind())

    def largest(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def any(self, flag: bool) -> bool:
        return bool(self.largest(torch.tensor(float(flag), device=self.device)).item())

    def told(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def dropout_seed(seed: int, rank: int, step: int = 0) -> int:
    """Of torch's own generator on this rank from `step` on, which on a CPU takes the lowest 32 bits of it."""
    return (seed + rank * 0x9E3779B1 + step * 0x85EBCA6B) % 2**62 if rank else seed


@contextmanager
def ranks_of(parallel: str, device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run, joined; `device` is where its tensors are."""
    place = launched()
    if place.size == 1:
        yield ONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        if parallel == "ddp":
            yield DataParallel(place.rank, place.size, device)
        else:
            from stability_lab.training.sharded import Sharded  # FSDP takes as long to load as half of torch

            yield Sharded(place.rank, place.size, device)
    finally:
        dist.destroy_process_group()
