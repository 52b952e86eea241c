"""A step on a GPU must not wait for it, and must be what a CUDA graph can hold: counted by torch's dispatcher on a CPU.

Fake CUDA tensors would check devices as well, but torch without CUDA aborts the process where one needs a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stability_lab.config import config_dir

# A number that the host reads, and results whose shape depends on values, which the host must read as well.
WAITS = {"_local_scalar_dense", "equal", "is_nonzero"}
SHAPES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"}
STABILIZERS = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def batches(run: Any, n: int) -> list[Any]:
    size = run.config.trainer.micro_batch_size * run.config.trainer.grad_accum_steps
    windows = (torch.from_numpy(run.sampler.batch(step * size, size)) for step in range(n))
    return [run.objective.batch(one, step * size) for step, one in enumerate(windows)]


VARIANTS = {
    "accumulation": ("trainer.grad_accum_steps=2",),
    "fp16": ("trainer.precision=fp16",),
    "bf16": ("trainer.precision=bf16",),
    "skip": ("stability.on_nonfinite=skip",),
    "no clip": ("trainer.grad_clip=null",),
    "sgd": ("optimizer=sgd",),
    "explicit attention": ("model.attention=explicit",),
    "documents": ("sampling.mask_documents=true",),
    "window": ("model.window=8",),
}
# Logits that are formed in fp16 are asked for with the precision.
NEEDS = {"dynamic_scaling": ("trainer.precision=fp16",)}
CASES = {name: (f"+stabilizer={name}", *NEEDS.get(name, ())) for name in STABILIZERS} | VARIANTS


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_no_number_and_makes_no_shape_from_values(tiny_run: Callable[..., Any], case: str) -> None:
    run = tiny_run(*CASES[case])
    first, *rest = batches(run, 4)
    run.step(first, 1e-3)  # state of the optimizer is made here
    with Counting() as counting:
        for batch in rest:
            run.step(batch, 1e-3)
    assert counting.seen["mm"] + counting.seen["addmm"] + counting.seen["bmm"] > 0
    assert {name: n for name, n in counting.seen.items() if name in WAITS | SHAPES} == {}


def test_the_count_sees_what_it_is_to_see() -> None:
    with Counting() as counting:
        x = torch.arange(4.0)
        if x.sum() > 1:
            x[x > 1].sum().item()
    assert counting.seen["_local_scalar_dense"] == 2
    assert SHAPES & set(counting.seen) or counting.seen["index"] == 1


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_a_step_keeps_moves(tiny_run: Callable[..., Any], case: str) -> None:
    """Weights, moments and scale stay where they are: a CUDA graph knows addresses."""
    run = tiny_run(*CASES[case])
    first, second = batches(run, 2)

    def kept() -> dict[str, int]:
        tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers()), **run.step.state()}
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    run.step(first, 1e-3)
    before = kept()
    run.step(second, 1e-3)
    assert kept() == before
