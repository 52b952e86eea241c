"""The fused kernel, called directly, against `torch.optim.AdamW`: weights and state, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stability_lab.training.fused_adamw import FusedAdamW

BETAS, EPS = (0.9, 0.95), 1e-8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 3))


def groups(of: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in of.parameters() if p.ndim == 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in of.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def gradients(of: nn.Module, seed: int, frozen: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in of.named_parameters():
        skip = frozen and name.startswith("2.")
        parameter.grad = None if skip else torch.randn(parameter.shape, generator=generator) * 10 ** (seed % 5 - 2)


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "some without a gradient"])
def test_it_does_what_torch_does(frozen: bool) -> None:
    ours, theirs = model(), model()
    own = FusedAdamW(groups(ours), 3e-3, BETAS, EPS)
    oracle = torch.optim.AdamW(groups(theirs), lr=3e-3, betas=BETAS, eps=EPS, fused=True)  # pyright: ignore
    for step in range(20):
        scale, called_off = torch.tensor(1.0 + step % 3), torch.tensor(float(step in (0, 5, 6)))
        for optimizer, of in ((own, ours), (oracle, theirs)):
            gradients(of, step, frozen)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 / (1 + step)
            optimizer.grad_scale, optimizer.found_inf = scale, called_off  # pyright: ignore
            optimizer.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
            assert_equal(own.state.get(p, {}), oracle.state.get(q, {}))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key])
