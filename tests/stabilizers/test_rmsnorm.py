"""RMSNorm: x / sqrt(mean(x^2) + eps) * gain, in fp32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stability_lab.numerics import rms_norm
from stability_lab.stabilizers.rmsnorm import RMSNorm, RMSNormStabilizer


def module(d: int, eps: float = 1e-6, gain: torch.Tensor | None = None) -> RMSNorm:
    norm = RMSNorm(d, eps=eps)
    if gain is not None:
        with torch.no_grad():
            norm.weight.copy_(gain)
    return norm


def test_reference_row():
    y = module(4).double()(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    assert y.tolist() == pytest.approx([0.3651483473, 0.7302966947, 1.0954450420, 1.4605933893], abs=1e-9)


def test_eps_stands_under_the_root():
    y = module(2, eps=0.5)(torch.tensor([1.0, 0.0]))
    assert y.tolist() == pytest.approx([1.0, 0.0])  # mean square 0.5, and 0.5 of eps


def test_it_does_not_centre():
    assert module(8)(torch.full((8,), 3.0)).tolist() == pytest.approx([1.0] * 8, rel=1e-5)


@pytest.mark.parametrize("factor", [1e-2, 1e3])
def test_scale_of_the_input_does_not_matter(factor):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(64, 1e-12)(factor * x), module(64, 1e-12)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("std", [0.05, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_input_is_normalised_in_fp32_and_rounded_once(dtype, std):
    torch.manual_seed(0)
    x, gain = (std * torch.randn(16, 128)).to(dtype), 1 + 0.1 * torch.randn(128)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * gain.double()
    y = module(128, gain=gain)(x)
    assert y.dtype == dtype
    # fp32 rounding may tip a value over the middle between two neighbours: rarely, and by one step only.
    assert (y != exact.to(dtype)).float().mean() < 1e-3
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_it_stands_at_every_norm_of_the_model(tiny_run):
    model = tiny_run("+stabilizer=rmsnorm", "stabilizer.rmsnorm.eps=1e-5").model
    norms = [m for m in model.modules() if isinstance(m, RMSNorm)]
    assert [norm.eps for norm in norms] == [1e-5] * 5
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())


def test_without_affine_there_is_no_gain(tiny_run):
    model = tiny_run("+stabilizer=rmsnorm", "stabilizer.rmsnorm.affine=false").model
    assert not [name for name, _ in model.named_parameters() if "norm" in name]


def test_gains_move_under_bf16(tiny_run, train_steps):
    run = tiny_run("+stabilizer=rmsnorm", "trainer.precision=bf16")
    train_steps(run, 3)
    gains = {name: p for name, p in run.model.named_parameters() if "norm" in name}
    assert len(gains) == 5
    for name, gain in gains.items():
        assert gain.dtype == torch.float32, name
        assert gain.ne(1).all(), name


@pytest.mark.parametrize("eps", [0.0, -1e-6, 1.0, float("nan")])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match=r"^eps="):
        RMSNormStabilizer(eps=eps)


@pytest.mark.parametrize("with_gain", [True, False])
def test_gradient_is_that_of_the_formula(with_gain):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(5, dtype=torch.float64, requires_grad=True)
    if with_gain:
        assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-6), (x, gain))
    else:
        assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-6), (x,))


@pytest.mark.oracle
def test_equals_torch_and_olmo2():
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    torch.manual_seed(0)
    gain = torch.randn(64)
    ours, theirs = module(64, gain=gain), Olmo2RMSNorm(64, eps=1e-6)
    theirs.weight.data.copy_(gain)
    x = torch.randn(8, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours(x), F.rms_norm(x, (64,), gain, 1e-6), rtol=1e-6, atol=1e-6)
    low = x.bfloat16()  # both multiply by the gain in fp32 and cast once
    torch.testing.assert_close(ours(low), theirs(low), rtol=2**-8, atol=1e-6)
