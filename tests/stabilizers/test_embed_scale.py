"""Scaled embeddings: token embeddings times sqrt(d_model) on their way into the residual stream."""

import math

import pytest
import torch
from torch import Tensor, nn

from stability_lab.build import Run
from stability_lab.model.gpt import GPT
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


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        ((), math.sqrt(32)),
        (("model.d_model=64",), 8.0),
        (("stabilizer.embed_scale.factor=3",), 3.0),
        (("stabilizer.embed_scale.factor=0.5",), 0.5),
    ],
)
@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_tokens_are_scaled_and_positions_are_not(tiny_run, words, factor, positions):
    model = tiny_run(NAME, f"model.positions={positions}", *words).model
    expected = factor * model.embed.weight[TOKENS]
    if positions == "learned":
        expected = expected + model.embed_positions.weight
    elif positions == "sinusoidal":
        expected = expected + model.position_table
    torch.testing.assert_close(residual_stream(model), expected.detach(), rtol=1e-6, atol=1e-7)


def logits_of(run: Run) -> Tensor:
    with torch.no_grad():
        return run.model(TOKENS).logits_BTV


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_head_is_not_scaled(tiny_run, tied):
    # Embeddings times the factor in the baseline do the same, were it not for a tied head.
    scaled, baseline = (tiny_run(*words, f"model.tied_head={tied}") for words in ((NAME,), ()))
    head = (baseline.model.embed if tied == "true" else baseline.model.head).weight.detach().clone()
    with torch.no_grad():
        baseline.model.embed.weight.mul_(math.sqrt(32))
    baseline.model.head = nn.Linear(*head.shape[::-1], bias=False)
    baseline.model.head.weight = nn.Parameter(head)
    torch.testing.assert_close(logits_of(scaled), logits_of(baseline), rtol=1e-4, atol=1e-6)


def test_factor_one_is_the_baseline(tiny_run):
    scaled, baseline = tiny_run(NAME, "stabilizer.embed_scale.factor=1"), tiny_run()
    assert torch.equal(logits_of(scaled), logits_of(baseline))


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_bad_factors_are_refused(factor):
    with pytest.raises(ValueError, match=f"^factor={factor:g}: must be positive and finite, or null for sqrt"):
        EmbedScale(factor)


@pytest.mark.oracle
def test_equals_gemma2(tiny_run):
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
    ours = tiny_run(NAME).model
    with torch.no_grad():
        ours.embed.weight.copy_(theirs.embed_tokens.weight)
    assert seen[0].std() > 0.05
    torch.testing.assert_close(residual_stream(ours), seen[0].detach(), rtol=1e-6, atol=1e-7)
    assert EmbedScale().apply(Seams()).owners == {"embed_scale": ("embed_scale",)}
