"""Each fused operation against autograd's gradient of its formula."""

import math

import pytest
import torch
from torch import Tensor, nn

from stability_lab.model.rope import rope_table, rotate
from stability_lab.numerics import SIGMOID_CAP, Cap, rms_norm
from stability_lab.objective.loss import IGNORE, language_model_loss
from stability_lab.stabilizers.zloss import SquaredLogZ
from stability_lab.training.optimizers import AdamW

# Some eight roundings.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 2e-15}


def seeded(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def assert_same(fused, plain, inputs: list[Tensor], tolerance: float) -> None:
    """Values and gradients of functions that take `inputs`; the tolerance is of the largest entry."""
    results = []
    for function in (fused, plain):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        gradients = torch.autograd.grad(y, leaves, seeded(*y.shape, dtype=y.dtype))
        results.append([y.detach(), *gradients])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [0.5, 30.0, SIGMOID_CAP])
def test_cap_is_that_of_tanh(cap, dtype):
    """The sigmoid's form loses some cap * eps to cancellation: cap * 1e-7 in fp32."""
    fused, plain = (Cap(cap, fused).to(dtype) for fused in (True, False))
    x = torch.cat([seeded(500, dtype=dtype, scale=s * cap) for s in (1e-3, 1.0, 10.0)])
    assert_same(fused, plain, [x], TOLERANCE[dtype])
    at_the_ends = torch.tensor([math.inf, -math.inf, 0.0, math.nan], dtype=dtype)
    assert fused(at_the_ends).tolist() == pytest.approx([cap, -cap, 0.0, math.nan], nan_ok=True)


def test_cap_above_100_is_tanh_bit_for_bit():
    x = seeded(1000, dtype=torch.float32, scale=1e4)
    cap = torch.tensor(1e6)
    assert torch.equal(Cap(1e6)(x), cap * torch.tanh(x / cap))
    # Its other form would be wrong by 0.06 there.
    by_sigmoid = cap * (2 * torch.sigmoid(2 * x / cap) - 1)
    assert (by_sigmoid - x).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_gain", [True, False])
def test_rms_norm(with_gain, dtype):
    x = seeded(3, 7, 48, dtype=dtype, scale=3.0).transpose(0, 1)  # not contiguous
    inputs = [x, seeded(48, dtype=dtype)] if with_gain else [x]

    def norm(fused: bool):
        return lambda x, gain=None: rms_norm(x, gain, 1e-6, fused)

    assert_same(norm(True), norm(False), inputs, TOLERANCE[dtype])


def test_rotation():
    cos, sin = (t.double() for t in rope_table(16, 8, 10_000.0))
    x = seeded(2, 4, 16, 8).transpose(1, 2)
    assert_same(lambda x: rotate(x, cos, sin), lambda x: rotate(x, cos, sin, fused=False), [x], 1e-15)


def test_loss_with_z_loss():
    logits, targets = seeded(20, 11, scale=5.0), torch.arange(20) % 11
    targets[::3] = IGNORE
    inv_n, terms = torch.tensor(1 / 13).double(), [SquaredLogZ(0.1).double()]

    def objective(fused: bool):
        return lambda logits: language_model_loss(logits, targets, inv_n, terms, None, fused).objective

    assert_same(objective(True), objective(False), [logits], 1e-14)
    ours, theirs = (language_model_loss(logits, targets, inv_n, terms, None, fused) for fused in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)


def test_adamw_and_its_state():
    """Over steps that are clipped, called off and taken at different rates."""
    updates = []
    for fused in (True, False):
        model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 4))
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        update = AdamW().build(model, fused)
        for step in range(4):
            for p in model.parameters():
                p.grad = seeded(step + 1, *p.shape, dtype=torch.float32)[-1]
            update.step(1e-2 / (step + 1), torch.tensor(2.0), torch.tensor(float(step == 2)))
        updates.append((dict(model.named_parameters()), update.state()))
    for ours, theirs in zip(*updates, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=2e-6, atol=1e-8)
