"""Rounding on purpose against torch's own fp8 numbers, and what it leaves alone."""

import pytest
import torch
from torch import nn

from stability_lab.config import ConfigError
from stability_lab.model.rounding import BLOCK, MXGain, MXLinear, e4m3, mxfp8


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.oracle
@pytest.mark.parametrize("scale", [1e-3, 0.02, 1.0, 100.0])
def test_e4m3_is_torchs_own_after_clamping(scale: float) -> None:
    x = normal(4096, scale=scale)
    theirs = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(e4m3(x), theirs, rtol=0, atol=0)


@pytest.mark.oracle
def test_e4m3_leaves_each_of_its_numbers_and_rounds_ties_to_even() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    torch.testing.assert_close(e4m3(numbers), numbers, rtol=0, atol=0)
    between = (numbers[1:] + numbers[:-1]) / 2
    torch.testing.assert_close(e4m3(between), between.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("size", [32, 40, 96])
def test_a_block_is_torchs_e4m3_times_the_power_of_two_of_its_largest_value(size: int) -> None:
    x = normal(5, size) * torch.logspace(-6, 6, 5)[:, None]
    parts = []
    for block in x.split(BLOCK, dim=-1):
        scale = 2.0 ** (block.abs().amax(-1, keepdim=True).log2().floor() - 8)
        parts.append((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    torch.testing.assert_close(mxfp8(x), torch.cat(parts, -1), rtol=0, atol=0)


def test_gains_near_one_collapse_to_three_values() -> None:
    gains = mxfp8(1 + normal(512, scale=0.02))
    assert set(gains.tolist()) == {0.9375, 1.0, 1.125}


def test_what_is_close_to_the_next_power_of_two_is_clamped() -> None:
    assert mxfp8(torch.full((32,), 1.99)).unique().tolist() == [1.75]


def test_the_gradient_passes_and_what_is_not_finite_is_not_hidden() -> None:
    x = normal(2, 64).requires_grad_()
    mxfp8(x).backward(grad := normal(2, 64))
    torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)
    assert mxfp8(torch.zeros(40)).eq(0).all()
    rounded = mxfp8(torch.tensor([torch.inf, *[1.0] * 63]))
    assert rounded[:BLOCK].isnan().all()
    assert rounded[BLOCK:].eq(1).all()


def test_the_gain_of_a_norm_is_rounded_and_its_bias_is_not() -> None:
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.copy_(1 + normal(32, scale=0.02))
        norm.bias.copy_(normal(32, scale=0.02))
    x = normal(3, 32)
    expected = nn.functional.layer_norm(x, (32,), mxfp8(norm.weight), norm.bias)
    torch.testing.assert_close(MXGain(norm)(x), expected, rtol=0, atol=0)


def test_each_key_rounds_its_own_part_and_they_go_together(tiny_run) -> None:
    """Initial weights are those of the plain model, and so are its layers where a key is null."""
    plain = tiny_run()
    tokens = torch.arange(16)[None]
    logits = {}
    for key, value in (("logits", "bf16"), ("scores", "fp16"), ("linears", "mxfp8"), ("gains", "mxfp8")):
        run = tiny_run(f"model.rounding.{key}={value}")
        assert any(isinstance(m, MXLinear) for m in run.model.modules()) == (key == "linears")
        assert any(isinstance(m, MXGain) for m in run.model.modules()) == (key == "gains")
        assert run.model.backend.name == ("explicit" if key == "scores" else "sdpa")
        torch.testing.assert_close(run.model.embed.weight, plain.model.embed.weight, rtol=0, atol=0)
        logits[key] = run.model(tokens).logits_BTV
    exact = plain.model(tokens).logits_BTV
    torch.testing.assert_close(logits["logits"], exact.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(logits["scores"], exact, rtol=0.02, atol=1e-4)
    torch.testing.assert_close(logits["gains"], exact, rtol=0, atol=1e-6)  # gains are 1 at the start
    assert 1e-5 < (logits["linears"] - exact).abs().max() < 0.1
    together = tiny_run(
        *("model.rounding.logits=bf16", "model.rounding.scores=fp16", "model.rounding.linears=mxfp8"),
        *("model.rounding.gains=mxfp8", "+stabilizer=[final_softcap,rmsnorm,qknorm,softcap]"),
    )
    output = together.model(tokens).logits_BTV
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in together.model.parameters())


def test_logits_above_the_largest_number_of_fp16_are_infinite(tiny_run) -> None:
    from stability_lab.model.attention import logit_stats

    large = torch.full((1, 1, 2, 8), 200.0)
    assert logit_stats(large, large, scale=1.0).max_logit_H.item() == 8 * 200**2
    assert logit_stats(large, large, scale=1.0, restore=1.0).max_logit_H.item() == torch.inf


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_scores_in_fp16_need_explicit_logits(tiny_run, attention: str) -> None:
    with pytest.raises(ConfigError, match=f"model.attention={attention}: model.rounding.scores=fp16 forms logits"):
        tiny_run("model.rounding.scores=fp16", f"model.attention={attention}")


def test_restored_logits_may_be_formed_in_fp16_in_any_precision(tiny_run) -> None:
    words = ("+stabilizer=dynamic_scaling", "stabilizer.dynamic_scaling.mode=query_key_layer")
    run = tiny_run(*words, "model.rounding.scores=fp16")
    assert run.model.backend.reason == "dynamic_scaling forms logits in fp16"
    assert [block.attn.restore for block in run.model.blocks] == [1.0, 2.0]
