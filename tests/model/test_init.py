"""Initial values: one generator a parameter, and the published standard deviations."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from stability_lab.config import InitConfig
from stability_lab.model.init import fingerprints, initialise, parameter_generator, weight_std
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams


def linear_std(scheme: str, name: str, fan_in: int, n_layers: int, std: float = 0.02) -> float:
    config = InitConfig(scheme=scheme, std=std, truncate=None)
    return weight_std(config, name, nn.Linear(fan_in, 1, bias=False), n_layers)


def model_of(config, seed: int = 0) -> GPT:
    model = GPT(dataclasses.replace(config, vocab_size=257), Seams())
    initialise(model, seed)
    return model


@pytest.mark.parametrize(
    ("scheme", "name", "fan_in", "std"),
    [
        ("normal", "blocks.3.attn.wo", 768, 0.02),
        ("gpt2", "blocks.3.attn.wq", 768, 0.02),
        ("gpt2", "blocks.3.attn.wo", 768, 0.0040824829),
        ("gpt2", "blocks.3.mlp.w_down", 3072, 0.0040824829),
        ("gpt2", "head", 768, 0.02),
        ("mitchell", "blocks.0.attn.wq", 768, 0.0360844),
        ("mitchell", "blocks.11.mlp.w_up", 768, 0.0360844),
        ("mitchell", "blocks.0.attn.wo", 768, 0.0255155),
        ("mitchell", "blocks.11.attn.wo", 768, 0.0073657),
        ("mitchell", "blocks.0.mlp.w_down", 3072, 0.0127578),
        ("mitchell", "blocks.11.mlp.w_down", 3072, 0.0036828),
        ("fan_in", "blocks.0.mlp.w_down", 3072, 3072**-0.5),
        ("fan_in", "head", 768, 768**-0.5),
    ],
)
def test_published_standard_deviations(scheme, name, fan_in, std):
    assert linear_std(scheme, name, fan_in, n_layers=12) == pytest.approx(std, rel=2e-5)


@pytest.mark.parametrize(("scheme", "std"), [("normal", 0.02), ("gpt2", 0.02), ("mitchell", 1 / 8), ("fan_in", 1 / 8)])
def test_embeddings(scheme, std):
    config = InitConfig(scheme=scheme, std=0.02, truncate=None)
    assert weight_std(config, "embed", nn.Embedding(10, 64), 12) == pytest.approx(std)


@pytest.mark.parametrize("scheme", ["normal", "gpt2", "mitchell", "fan_in"])
def test_drawn_values_have_these_standard_deviations(tiny_config, scheme):
    model = model_of(tiny_config(f"model.init.scheme={scheme}", "model.d_model=384", "model.bias=true").model)
    measured = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert module.bias.eq(0).all(), name
        if isinstance(module, nn.Linear | nn.Embedding):
            # At 98,688 entries and more, 1.5% is over six standard errors.
            expected = weight_std(model.config.init, name, module, 2)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.015), name
            assert abs(module.weight.mean().item()) < 5 * expected / math.sqrt(module.weight.numel()), name
            measured += 1
    assert measured == 2 * 6 + 2


def test_truncation_at_three_sigma(tiny_config):
    model = model_of(tiny_config("model.init.truncate=3", "model.d_model=384").model)
    weight = torch.cat([b.mlp.w_up.weight.flatten() for b in model.blocks])  # type: ignore[union-attr]
    assert 0.059 < weight.abs().max() <= 0.06
    assert (weight.std() / 0.02).item() == pytest.approx(0.98657839, abs=0.003)


def test_each_parameter_has_its_own_generator(tiny_config):
    base = fingerprints(model_of(tiny_config().model))
    for override in ("model.n_layers=3", "model.bias=true", "model.positions=learned", "model.tied_head=true"):
        other = fingerprints(model_of(tiny_config(override).model))
        assert base.keys() != other.keys()
        shared = base.keys() & other.keys()
        assert {n: base[n] for n in shared} == {n: other[n] for n in shared}, override
    matrices = [value for name, value in base.items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices)


def test_seed_decides_every_matrix_and_nothing_else_does(tiny_config):
    config = tiny_config().model
    first = fingerprints(model_of(config))
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    model = GPT(dataclasses.replace(config, vocab_size=257), Seams())
    state = torch.random.get_rng_state()  # torch's own initialisation of the modules consumes numbers
    initialise(model, 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(state, before)
    assert fingerprints(model) == first
    other = fingerprints(model_of(config, seed=1))
    assert {n for n in first if first[n] == other[n]} == {n for n in first if "norm" in n}


def test_generator_depends_on_seed_and_name():
    draws = {
        torch.randn((), generator=parameter_generator(seed, name)).item() for seed in (0, 1, 10) for name in ("a", "b")
    }
    assert len(draws) == 6
    first, again = (torch.randn(3, generator=parameter_generator(7, "x")) for _ in range(2))
    assert torch.equal(first, again)
