"""Scaled embeddings: token embeddings times sqrt(d_model) on their way into the residual stream."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams
from stability_lab.stabilizers.embed_scale import EmbedScale

NAME = "+stabilizer=embed_scale"
TOKENS = torch.arange(32).view(2, 16)


def residual_stream(model: GPT) -> Tensor:
    """What enters the first block."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(TOKENS)
    hook.remove()
    return seen[0]


@pytest.fixture(scope="module")
def build(tiny_config):
    """`build(stabilizer or None, field=value, ...)`: a model of `ModelConfig` with these fields."""

    def model(scale: EmbedScale | None, **fields) -> GPT:
        config = dataclasses.replace(tiny_config().model, vocab_size=257, **fields)
        gpt = GPT(config, Seams() if scale is None else scale.apply(Seams()))
        initialise(gpt, 0)
        return gpt

    return model


@pytest.mark.parametrize(
    ("given", "d_model", "factor"), [(None, 32, math.sqrt(32)), (None, 64, 8.0), (3.0, 32, 3.0), (0.5, 64, 0.5)]
)
@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_tokens_are_scaled_and_positions_are_not(build, given, d_model, factor, positions):
    model = build(EmbedScale(given), d_model=d_model, positions=positions)
    expected = factor * model.embed.weight[TOKENS]
    if positions == "learned":
        expected = expected + model.embed_positions.weight
    elif positions == "sinusoidal":
        expected = expected + model.embed_positions.table
    torch.testing.assert_close(residual_stream(model), expected.detach(), rtol=1e-6, atol=1e-7)


def test_the_configs_factor_is_used(tiny_run):
    model = tiny_run(NAME, "stabilizer.embed_scale.factor=3").model
    torch.testing.assert_close(residual_stream(model), 3 * model.embed.weight[TOKENS].detach(), rtol=1e-6, atol=0)


@torch.no_grad()
def logits_of(model: GPT) -> Tensor:
    return model(TOKENS).logits_BTV


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_not_scaled(build, tied):
    # The baseline with scaled embeddings and the same head does the same.
    scaled, baseline = build(EmbedScale(), tied_head=tied), build(None, tied_head=False)
    with torch.no_grad():
        baseline.head.weight.copy_(scaled.embed.weight if tied else scaled.head.weight)
        baseline.embed.weight.mul_(math.sqrt(32))
    torch.testing.assert_close(logits_of(scaled), logits_of(baseline), rtol=1e-4, atol=1e-6)


def test_factor_one_is_the_baseline(build):
    assert torch.equal(logits_of(build(EmbedScale(1.0))), logits_of(build(None)))


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_bad_factors_are_refused(factor):
    with pytest.raises(ValueError, match=f"^factor={factor:g}: must be positive and finite, or null for sqrt"):
        EmbedScale(factor)


@pytest.mark.oracle
def test_equals_gemma2(build):
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=16,
        layer_types=["full_attention"],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    theirs = Gemma2Model(config).eval()
    seen: list[Tensor] = []
    theirs.layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True)
    theirs(TOKENS)
    ours = build(EmbedScale())
    with torch.no_grad():
        ours.embed.weight.copy_(theirs.embed_tokens.weight)
    assert seen[0].std() > 0.05
    torch.testing.assert_close(residual_stream(ours), seen[0].detach(), rtol=1e-6, atol=1e-7)
    assert EmbedScale().apply(Seams()).owners == {"embed_scale": ("embed_scale",)}
