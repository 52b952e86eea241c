"""The model: sizes, options, and equality with GPT-2."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from stability_lab.build import build_model, build_stabilizers, fill_seams
from stability_lab.diagnostics.probe import watching
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT, parameter_counts
from stability_lab.seams import Seams


@pytest.fixture
def build(tiny_config):
    def model(*overrides: str) -> GPT:
        config = dataclasses.replace(tiny_config(*overrides).model, vocab_size=65)
        gpt = GPT(config, Seams())
        initialise(gpt, 0)
        return gpt

    return model


GPT2_MODULES = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
TOKENS = torch.arange(32).view(2, 16)


@pytest.mark.parametrize(
    ("model", "total", "non_embedding"),
    [
        ("gpt_nano", None, (0.78e6, 0.80e6)),
        ("gpt_micro", None, (4.6e6, 5.1e6)),
        ("gpt_27m", (26.7e6, 26.8e6), None),
        ("gpt2_124m", (124_439_808, 124_439_808), None),
        ("gpt_350m", (350e6, 356e6), (301.5e6, 302.5e6)),
        ("nvidia_830m", (820e6, 835e6), (301.5e6, 302.5e6)),
        ("olmo2_1b", (1.45e9, 1.5e9), (1.05e9, 1.1e9)),
    ],
)
def test_sizes(compose_config, model, total, non_embedding):
    config = compose_config(f"model={model}").model
    assert config.name == model
    with torch.device("meta"):
        gpt = GPT(dataclasses.replace(config, vocab_size=config.vocab_size or 257), Seams())
    counts = parameter_counts(gpt)
    for key, bounds in (("total", total), ("non_embedding", non_embedding)):
        if bounds is not None:
            assert bounds[0] <= counts[key] <= bounds[1], (key, counts[key])


def test_output_shapes(build):
    model = build()
    output = model(TOKENS)
    assert output.logits_BTV.shape == (2, 16, 65)
    assert output.attn_logit_bound_L.shape == (2,)
    assert not output.attn_logit_bound_L.requires_grad
    assert model(TOKENS[:, :5]).logits_BTV.shape == (2, 5, 65)


def test_bound_covers_what_the_probe_measures(build):
    model = build("model.init.std=0.5")
    with watching(model) as (stats, _):
        bound_L = model(TOKENS).attn_logit_bound_L
    for bound, layer in zip(bound_L, stats, strict=True):
        assert layer.max_abs_logit_H.amax() <= bound * (1 + 1e-6)
    assert len({round(b.item(), 3) for b in bound_L}) == 2


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_positions_are_seen(build, positions):
    model = build(f"model.positions={positions}", "model.init.scheme=fan_in")
    repeated = torch.full((1, 16), 7)
    varied = TOKENS[:1].clone()
    assert isinstance(model.embed_positions, nn.Embedding) == (positions == "learned")
    if positions != "rope":  # a repeated token gives every key the same value, and RoPE turns only queries and keys
        assert not torch.allclose(model(repeated).logits_BTV[0, 1], model(repeated).logits_BTV[0, 9], atol=1e-4)
    swapped = varied.clone()
    swapped[0, [2, 5]] = swapped[0, [5, 2]]
    assert not torch.allclose(model(varied).logits_BTV[0, -1], model(swapped).logits_BTV[0, -1], atol=1e-5)


def test_without_positions_earlier_tokens_are_a_set(build):
    model = build("model.positions=none", "model.n_layers=1", "model.init.scheme=fan_in")
    swapped = TOKENS[:1].clone()
    swapped[0, [2, 5]] = swapped[0, [5, 2]]
    torch.testing.assert_close(model(TOKENS[:1]).logits_BTV[0, -1], model(swapped).logits_BTV[0, -1])


def test_tied_head_is_the_embedding(build):
    tied, untied = build("model.tied_head=true"), build()
    assert tied.head is None
    assert parameter_counts(untied)["total"] - parameter_counts(tied)["total"] == 65 * 32
    assert parameter_counts(untied)["non_embedding"] == parameter_counts(tied)["non_embedding"]
    tied(TOKENS).logits_BTV.square().sum().backward()
    assert tied.embed.weight.grad is not None
    assert tied.embed.weight.grad[64].ne(0).any()  # not among the inputs: reached through the head only


def test_biases(build):
    def biases(model: GPT) -> set[str]:
        return {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}

    every = {n for n, m in build().named_modules() if isinstance(m, nn.Linear)}
    assert biases(build()) == set()
    assert biases(build("model.bias=true")) == every - {"head"}


def test_swiglu(build):
    mlp = build("model.mlp=swiglu", "model.d_ff=24").blocks[0].mlp
    x = torch.randn(3, 32)
    gate, up = x @ mlp.w_gate.weight.T, x @ mlp.w_up.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ mlp.w_down.weight.T
    assert mlp.w_up.weight.shape == (24, 32)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-7)


def test_gelu_is_the_exact_one(build):
    mlp = build("model.init.scheme=fan_in").blocks[0].mlp
    x = torch.randn(3, 32)
    up = x @ mlp.w_up.weight.T
    expected = (0.5 * up * (1 + torch.erf(up / math.sqrt(2)))) @ mlp.w_down.weight.T
    assert mlp.w_up.weight.shape == (128, 32)
    assert mlp.w_gate is None
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)


def test_grouped_keys_and_values(build):
    attention = build("model.n_kv_heads=2").blocks[0].attn
    assert attention.wq.weight.shape == (32, 32)
    assert attention.wk.weight.shape == attention.wv.weight.shape == (16, 32)


def test_dropout_is_off_in_evaluation(build):
    model = build("model.dropout=0.5")
    assert not torch.equal(model(TOKENS).logits_BTV, model(TOKENS).logits_BTV)
    model.eval()
    assert torch.equal(model(TOKENS).logits_BTV, model(TOKENS).logits_BTV)


@pytest.mark.oracle
@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_equals_gpt2_with_the_same_weights(build, backend):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=65,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights = theirs.transformer.state_dict()
    ours = build("model.positions=learned", "model.bias=true", "model.tied_head=true", f"model.attention={backend}")
    state = {"embed.weight": weights["wte.weight"], "embed_positions.weight": weights["wpe.weight"]}
    for kind in ("weight", "bias"):
        state[f"final_norm.{kind}"] = weights[f"ln_f.{kind}"]
        for i in range(2):
            layer, our = {name: weights[f"h.{i}.{name}.{kind}"] for name in GPT2_MODULES}, f"blocks.{i}"
            if kind == "weight":  # their linear layers hold the transposed matrix, and q, k and v in one
                layer = {name: value.mT if value.ndim == 2 else value for name, value in layer.items()}
            values = [layer["ln_1"], layer["ln_2"], *layer["attn.c_attn"].chunk(3)]
            values += [layer["attn.c_proj"], layer["mlp.c_fc"], layer["mlp.c_proj"]]
            names = ("attn_norm", "mlp_norm", "attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_up", "mlp.w_down")
            state |= {f"{our}.{name}.{kind}": value for name, value in zip(names, values, strict=True)}
    ours.load_state_dict(state)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(TOKENS).logits_BTV, expected, rtol=1e-5, atol=1e-5)


def test_printing_the_model_shows_who_owns_which_seam(tiny_config):
    config = tiny_config("+stabilizer=[qknorm,zloss]")
    seams = fill_seams(build_stabilizers(config))
    assert "seams: loss_terms <- zloss; qk_transform <- qknorm" in repr(build_model(config, 257, seams))
    assert "seams: all empty" in repr(build_model(tiny_config(), 257, Seams()))
