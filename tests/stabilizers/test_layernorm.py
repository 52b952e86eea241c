"""LayerNorm: (x - mean) / sqrt(var + eps) * gain + bias; its defaults are the baseline's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stability_lab.seams import Seams, Site
from stability_lab.stabilizers.layernorm import LayerNorm


def layer_norm(d: int, **options) -> nn.LayerNorm:
    norm = LayerNorm(**options).apply(Seams()).norm(Site(0, 1, "attn", d, n_heads=1, n_kv_heads=1, head_dim=d))
    assert isinstance(norm, nn.LayerNorm)
    return norm


@pytest.mark.parametrize(
    ("eps", "outer", "inner"), [(1e-5, 1.3416354200, 0.4472118067), (1e-12, 1.3416407865, 0.4472135955)]
)
def test_reference_rows(eps, outer, inner):
    y = layer_norm(4, eps=eps).double()(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    assert y.tolist() == pytest.approx([-outer, -inner, inner, outer], abs=1e-9)


@pytest.mark.parametrize(("factor", "shift"), [(1e-2, 0.0), (1e2, 5.0)])
def test_scale_and_shift_of_the_input_do_not_matter(factor, shift):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    norm = layer_norm(64, eps=1e-12)
    torch.testing.assert_close(norm(factor * x + shift), norm(x), rtol=1e-4, atol=1e-5)


def test_defaults_are_the_baseline_bit_for_bit(tiny_run, train_steps):
    plain, ours = tiny_run(), tiny_run("+stabilizer=layernorm")
    assert ours.model.seams.owners == {"norm": ("layernorm",)}
    assert train_steps(plain, 5) == train_steps(ours, 5)
    for (name, a), b in zip(plain.model.state_dict().items(), ours.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, ("bias", "weight")),
        ({"bias": False}, ("weight",)),
        ({"affine": False}, ()),
        ({"affine": False, "bias": False}, ()),
    ],
    ids=str,
)
def test_gain_and_bias_can_be_left_out(options, parameters):
    assert sorted(name for name, _ in layer_norm(8, **options).named_parameters()) == list(parameters)


def test_eps_reaches_every_norm_of_the_model(tiny_run):
    model = tiny_run("+stabilizer=layernorm", "stabilizer.layernorm.eps=1e-3").model
    assert [m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)] == [1e-3] * 5


@pytest.mark.parametrize("std", [0.05, 1.0, 300.0])
def test_statistics_are_fp32_under_bf16(std):
    torch.manual_seed(0)
    x = (std * torch.randn(16, 128) + 2 * std).bfloat16()
    norm = layer_norm(128)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    exact = F.layer_norm(x.double(), (128,), eps=1e-5)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-3)


def test_gains_and_biases_move_under_bf16(tiny_run, train_steps):
    run = tiny_run("+stabilizer=layernorm", "trainer.precision=bf16")
    start = {name: p.detach().clone() for name, p in run.model.named_parameters() if "norm" in name}
    train_steps(run, 3)
    assert len(start) == 10
    for name, p in run.model.named_parameters():
        if name in start:
            assert p.dtype == torch.float32, name
            assert p.ne(start[name]).all(), name


@pytest.mark.parametrize("eps", [0.0, -1e-5, 1.0, float("nan")])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match=r"^eps="):
        LayerNorm(eps=eps)


@pytest.mark.oracle
def test_equals_torch_and_gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    torch.manual_seed(0)
    theirs = GPT2Block(GPT2Config(n_embd=64, n_head=4, n_layer=1), layer_idx=0).ln_1
    ours = layer_norm(64)
    for norm in (ours, theirs):
        torch.manual_seed(1)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(8, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours(x), F.layer_norm(x, (64,), ours.weight, ours.bias, 1e-5), rtol=0, atol=0)
