"""Tests that only a CUDA device can settle. Without one they are skipped, here and nowhere else.

`scripts/gpu_check.sh --dry` rehearses them on CPU (STABILITY_LAB_REHEARSE_GPU=1): what runs there cannot fail on the
GPU for a wrong name or a wrong shape. Tests that ask for `cuda` are skipped in a rehearsal too.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stability_lab.build import build_run
from stability_lab.config import TrainConfig
from stability_lab.objective.objective import Batch
from stability_lab.training.loop import Run

# A head of 16 is the smallest that FlexAttention's kernel takes.
SMALL = (
    "model.d_model=64",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.seq_len=64",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=5",
    "trainer.log_every=5",
    "trainer.eval_sequences=8",
    "diagnostics.probe_sequences=2",
    "schedule.warmup_steps=2",
    "optimizer.lr=1e-2",
    "tracking=local",
)

BuildRun = Callable[..., Run]
Rows = list[dict[str, float]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The compilers of a GPU's kernels have warnings of their own, other ones in each release: shown, no errors.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("STABILITY_LAB_REHEARSE_GPU") == "1":
        return torch.device("cpu")
    pytest.skip("torch finds no CUDA device")


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """The device, of tests that have no meaning on another one."""
    if device.type != "cuda":
        pytest.skip("only a CUDA device can show this")
    return device


@pytest.fixture(scope="session")
def small_overrides(device: torch.device) -> tuple[str, ...]:
    return (*SMALL, f"trainer.device={device.type}")


@pytest.fixture(scope="session")
def gpu_run(compose_config: Callable[..., TrainConfig], small_overrides: tuple[str, ...]) -> BuildRun:
    """`gpu_run(*overrides)`: a freshly built small run on the device under test; later overrides win."""
    return lambda *overrides: build_run(compose_config(*small_overrides, *overrides))


def batch_of(run: Run, step: int) -> Batch:
    size = run.config.trainer.micro_batch_size * run.config.trainer.grad_accum_steps
    first = (step - 1) * size
    return run.objective.batch(torch.from_numpy(run.sampler.batch(first, size)).to(run.device), first)


@pytest.fixture(scope="session")
def take_steps() -> Callable[[Run, int], Rows]:
    """`take_steps(run, n)`: the rows of the run's first n steps."""

    def train(run: Run, n: int) -> Rows:
        rows = [run.step(batch_of(run, step), run.schedule.lr(step)) for step in range(1, n + 1)]
        return [dict(zip(run.step.columns, row.tolist(), strict=True)) for row in rows]

    return train


class Silent:
    """A sink that keeps events only."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        pass

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))


@pytest.fixture
def sink() -> Silent:
    return Silent()
