"""A factor on each layer's attention logits: its values, that it reaches the logits, and fp16's trick."""

import math

import pytest
import torch
from torch import Tensor, nn

from stability_lab import cli
from stability_lab.build import check
from stability_lab.config import ConfigError
from stability_lab.diagnostics.probe import probe_attention, watching
from stability_lab.model.attention import Attention, explicit_attention
from stability_lab.model.transformer import site_of
from stability_lab.seams import Seams, Site, Unscaled
from stability_lab.stabilizers.dynamic_scaling import PRESETS, DynamicScaling, LearnedScale
from stability_lab.training.loop import Run
from stability_lab.training.optimizers import parameter_groups

NAME = "+stabilizer=dynamic_scaling"
KEY = "stabilizer.dynamic_scaling"
QUERY_KEY_LAYER = (NAME, f"{KEY}.mode=query_key_layer")
WIDE = "model.init.std=0.5"


def factors(n_layers: int, **options) -> list[float]:
    seams = DynamicScaling(**options).apply(Seams())
    modules = [seams.attn_scale(Site(i, n_layers, "attn", 4 * 8, 4, 4, 8)) for i in range(n_layers)]
    return [module.factor.item() for module in modules]  # type: ignore[operator]


def probe(run: Run) -> dict[str, float]:
    return probe_attention(run.model, run.objective, run.probe_windows)


def outcome(run: Run) -> dict[str, Tensor]:
    """Loss and gradients of the first batch."""
    tokens = torch.from_numpy(run.sampler.batch(0, 4))
    sums, _ = run.step.forward(run.objective.batch(tokens, 0), torch.tensor(1 / 64))
    run.model.zero_grad()
    sums.objective.backward()
    gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return {"loss": sums.objective.detach(), **gradients}


@pytest.mark.parametrize(
    ("options", "n_layers", "expected"),
    [
        ({}, 4, [1, 1 / 2, 1 / 3, 1 / 4]),
        ({"mode": "inverse_layer"}, 4, [1, 1 / 2, 1 / 3, 1 / 4]),
        ({"mode": "query_key_layer"}, 3, [1, 1 / 2, 1 / 3]),
        ({"mode": "linear", "preset": "up"}, 5, [0.5, 0.75, 1, 1.25, 1.5]),
        ({"mode": "linear", "preset": "down"}, 5, [1.5, 1.25, 1, 0.75, 0.5]),
        ({"mode": "linear", "preset": "flat"}, 5, [1, 1, 1, 1, 1]),
        ({"mode": "linear", "first": 2, "last": 8}, 4, [2, 4, 6, 8]),
        ({"mode": "linear", "first": 3.0, "last": 1.0}, 1, [3]),
        ({"mode": "learned"}, 3, [1, 1, 1]),
    ],
)
def test_factors(options, n_layers, expected):
    assert factors(n_layers, **options) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("n_layers", [2, 5, 12])
def test_presets_have_the_same_mean(n_layers):
    for preset in PRESETS:
        assert sum(factors(n_layers, mode="linear", preset=preset)) / n_layers == pytest.approx(1, rel=1e-6), preset


def test_bf16_rounds_the_product_and_not_the_factor():
    """1/3 is 0.33398 in bf16, and exp(0.003) is 1."""
    third = DynamicScaling().apply(Seams()).attn_scale(Site(2, 3, "attn", 32, 4, 4, 8))
    learned = LearnedScale()
    nn.init.constant_(learned.theta, 0.003)
    q = torch.linspace(-3, 3, 512).bfloat16()
    for module, factor in ((third, 1 / 3), (learned, math.exp(0.003))):
        expected = (q.double() * factor).bfloat16()
        assert torch.equal(module(q), expected)
        assert not torch.equal(q * torch.tensor(factor).bfloat16(), expected)


def test_published_scale():
    assert factors(4)[3] * 8**-0.5 == pytest.approx(0.0883883476, rel=1e-8)


def test_three_token_example():
    q = torch.tensor([[1, 0], [0, 2], [10, 10]], dtype=torch.float64).view(1, 3, 1, 2)
    k = torch.tensor([[1, 1], [2, -1], [3, 6]], dtype=torch.float64).view(1, 1, 3, 2)
    v = torch.tensor([[1, 0], [0, 1], [2, 2]], dtype=torch.float64).view(1, 1, 3, 2)
    module = DynamicScaling().apply(Seams()).attn_scale(Site(3, 4, "attn", 2, 1, 1, 2))
    y = explicit_attention(module(q).transpose(1, 2), k, v, 2**-0.5)[0, 0]
    assert y[1].tolist() == pytest.approx([0.6697615493, 0.3302384507], abs=1e-9)
    assert y[2].tolist() == pytest.approx([1.9999943318, 1.9999908277], abs=1e-9)


@pytest.mark.parametrize("model", [(), ("model.n_kv_heads=2", "model.bias=true"), ("model.positions=learned",)])
def test_inverse_layer_halves_the_logits_of_the_second_layer_exactly(tiny_run, model):
    baseline, scaled = probe(tiny_run(WIDE, *model)), probe(tiny_run(NAME, WIDE, *model))
    assert baseline["attn/max_logit/L01"] > 0.1
    assert scaled["attn/max_logit/L00"] == baseline["attn/max_logit/L00"]
    assert scaled["attn/max_logit/L01"] == baseline["attn/max_logit/L01"] / 2
    assert (scaled["attn/scale/L00"], scaled["attn/scale/L01"]) == (1, 0.5)
    assert not any(key.startswith("attn/scale") for key in baseline)


def test_a_larger_factor_is_sharper(tiny_run):
    entropy, largest = {}, {}
    for preset in PRESETS:
        measured = probe(tiny_run(NAME, f"{KEY}.mode=linear", f"{KEY}.preset={preset}", WIDE))
        entropy[preset], largest[preset] = measured["attn/entropy/L00"], measured["attn/max_logit/L00"]
    assert entropy["down"] < entropy["flat"] < entropy["up"]
    assert largest["down"] == pytest.approx(1.5 * largest["flat"], rel=1e-5)
    assert largest["up"] == pytest.approx(0.5 * largest["flat"], rel=1e-5)


@pytest.mark.parametrize("options", [(f"{KEY}.mode=learned",), (f"{KEY}.mode=linear", f"{KEY}.preset=flat")])
def test_factors_of_one_equal_the_baseline_bit_for_bit(tiny_run, options):
    scaled, baseline = outcome(tiny_run(NAME, *options, WIDE)), outcome(tiny_run(WIDE))
    for name, value in baseline.items():
        assert torch.equal(scaled[name], value), name


def test_learned_factors(tiny_run, train_steps):
    run = tiny_run(NAME, f"{KEY}.mode=learned", WIDE, "optimizer.weight_decay=100")
    thetas = {
        f"blocks.{i}.attn.attn_scale.theta": block.attn.attn_scale.theta for i, block in enumerate(run.model.blocks)
    }
    assert {name for name, _ in run.model.named_parameters() if "scale" in name} == thetas.keys()
    for name, theta in thetas.items():
        assert theta.shape == (1,)
        gradient = outcome(run)[name]
        # d loss / d theta is the sum over q of q * d loss / d q: compare with a step of the factor itself.
        losses = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                theta.fill_(step)
            losses.append(outcome(run)["loss"].double().item())
        with torch.no_grad():
            theta.zero_()
        assert gradient.item() == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=2e-2)
    groups = {name: group for group, members in parameter_groups(run.model).items() for name, _ in members}
    assert {groups[name] for name in thetas} == {groups["final_norm.weight"]}  # gains, which do not decay
    assert probe(run)["attn/scale/L01"] == 1
    train_steps(run, 3)
    measured = probe(run)
    for i, theta in enumerate(thetas.values()):
        # With decay at 100 a theta that decayed would be pulled to 0; and the factor is positive whatever theta is.
        assert 1e-3 < theta.abs().item() < 0.1
        assert measured[f"attn/scale/L{i:02d}"] == pytest.approx(math.exp(theta.item()), rel=1e-6)
    with torch.no_grad():
        theta.fill_(-20.0)
    assert 0 < probe(run)["attn/scale/L01"] < 1e-8


# query_key_layer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_query_key_layer_is_refused_where_it_would_do_nothing(precision, tiny_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", *tiny_overrides, *QUERY_KEY_LAYER, f"trainer.precision={precision}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: trainer.precision={precision}: stabilizer dynamic_scaling restores")
    assert "trainer.precision=fp16" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("model.attention=sdpa",), r"^model\.attention=sdpa: stabilizer dynamic_scaling .* needs explicit logits"),
        (("model.attention=flex",), r"^model\.attention=flex: "),
        (("+stabilizer=[dynamic_scaling,softcap]",), r"^stabilizer=\[dynamic_scaling,softcap\]: .*'score_restore'"),
    ],
)
def test_query_key_layer_is_refused_with_what_cannot_honour_it(tiny_config, words, reason):
    config = tiny_config(*QUERY_KEY_LAYER, "trainer.precision=fp16", *words)
    with pytest.raises(ConfigError, match=reason):
        check([config])


def test_softcap_and_query_key_layer_end_the_command(tiny_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    both = ("+stabilizer=[softcap,dynamic_scaling]", QUERY_KEY_LAYER[1], "trainer.precision=fp16")
    assert cli.run(["train", *tiny_overrides, *both]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: stabilizer=[dynamic_scaling,softcap]: ")
    assert len(error.splitlines()) == 1


def test_query_key_layer_is_the_baseline_where_fp16_is_exact():
    # Small multiples of 1/8 with scale 1/2: every product and sum below is a number of fp16.
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-8, 9, (2, 4, 16, 4), generator=generator) / 8 for _ in range(3))
    for layers in (1, 2, 4):
        y = explicit_attention(q / layers, k, v, 0.5, restore=float(layers))
        torch.testing.assert_close(y, explicit_attention(q, k, v, 0.5), rtol=0, atol=0)


def test_query_key_layer_forms_the_logits_in_fp16():
    q, k, v = (torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    logits = (((q / 3).half() * 8**-0.5) @ k.half().mT).float() * 3
    expected = logits.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v
    got = explicit_attention(q / 3, k, v, 8**-0.5, restore=3.0)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert 1e-6 < (got - explicit_attention(q, k, v, 8**-0.5)).abs().max() < 1e-2


def test_query_key_layer_trains_as_the_baseline_does(tiny_run, train_steps):
    scaled, baseline = (tiny_run(*words, "trainer.precision=fp16", WIDE) for words in (QUERY_KEY_LAYER, ()))
    assert scaled.model.backend == ("explicit", "dynamic_scaling forms logits in fp16")
    assert [block.attn.restore for block in scaled.model.blocks] == [1, 2]
    # What is measured is the model's logits and not the smaller ones that fp16 holds.
    ours, theirs = probe(scaled), probe(baseline)
    assert ours["attn/max_logit/L01"] == pytest.approx(theirs["attn/max_logit/L01"], rel=2e-3)
    rows, expected = train_steps(scaled, 3), train_steps(baseline, 3)
    for a, b in zip(rows, expected, strict=True):
        assert a["bad"] == 0
        for key in ("train/loss", "optim/grad_norm", "attn/logit_bound"):
            assert a[key] == pytest.approx(b[key], rel=1e-2), key


def test_query_key_layer_keeps_fp16_from_overflowing(tiny_config):
    """Logits beyond fp16's 65,504, but not four times that, in the fourth of four layers."""
    config = tiny_config("model.n_layers=4", "model.attention=explicit").model
    seams = DynamicScaling(mode="query_key_layer").apply(Seams())
    plain = Seams().claim("test", score_restore=lambda shape: 1.0)  # logits in fp16 and no factor
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    outputs = {}
    for name, filled in (("scaled", seams), ("plain", plain), ("fp32", Seams())):
        torch.manual_seed(1)
        layer = Attention(config, site_of(config).at("attn", 3), filled, "explicit")
        with torch.no_grad():
            for matrix in (layer.wq, layer.wk):
                matrix.weight.mul_(300)
        with watching(layer) as (stats, _):
            outputs[name], _ = layer(x)
    assert 65_504 < stats[0].max_abs_logit_H.amax() < 4 * 65_504
    assert not outputs["plain"].isfinite().all()
    assert outputs["scaled"].isfinite().all()
    # Attention is all but one-hot at such logits, so fp16's rounding of them hardly shows.
    torch.testing.assert_close(outputs["scaled"], outputs["fp32"], rtol=1e-2, atol=1e-2)
    (gradient,) = torch.autograd.grad(outputs["scaled"].sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "inverse"}, "mode=inverse: must be one of inverse_layer, linear, learned, query_key_layer"),
        ({"mode": "linear"}, "first=null: mode=linear needs positive first and last, or a preset"),
        ({"mode": "linear", "first": 1.0}, "last=null: mode=linear needs"),
        ({"mode": "linear", "first": 0.0, "last": 1.0}, "first=0: mode=linear needs positive"),
        ({"mode": "linear", "first": 1.0, "last": -1.0}, "last=-1: mode=linear needs positive"),
        ({"mode": "linear", "first": 1.0, "last": math.inf}, "last=inf: mode=linear needs positive"),
        ({"mode": "linear", "first": math.nan, "last": 1.0}, "first=nan: mode=linear needs positive"),
        ({"mode": "linear", "preset": "sideways"}, "preset=sideways: must be one of up, down, flat"),
        ({"mode": "linear", "preset": "up", "first": 1.0}, "preset=up: give either a preset or first and last"),
        ({"preset": "up"}, "preset=up: only mode=linear takes it, and mode is inverse_layer"),
        ({"mode": "learned", "last": 2.0}, "last=2.0: only mode=linear takes it, and mode is learned"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        DynamicScaling(**options)


@pytest.mark.oracle
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_inverse_layer_equals_gpt2(tiny_config, layer):
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    theirs_config = GPT2Config(
        n_positions=16, n_embd=32, n_layer=4, n_head=4, scale_attn_by_inverse_layer_idx=True, attn_pdrop=0.0
    )
    theirs_config._attn_implementation = "eager"
    theirs = GPT2Attention(theirs_config, layer_idx=layer).eval()
    config = tiny_config("model.n_layers=4", "model.bias=true").model
    torch.manual_seed(0)
    ours = Attention(config, site_of(config).at("attn", layer), DynamicScaling().apply(Seams()), "sdpa")
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        theirs.c_attn.weight.copy_(torch.cat([w.weight.T for w in (ours.wq, ours.wk, ours.wv)], 1))
        theirs.c_attn.bias.copy_(torch.cat([w.bias for w in (ours.wq, ours.wk, ours.wv)]))
        theirs.c_proj.weight.copy_(ours.wo.weight.T)
        theirs.c_proj.bias.copy_(ours.wo.bias)
        x = torch.randn(2, 16, 32)
        mask = torch.full((16, 16), -torch.inf).triu(1).expand(2, 1, 16, 16)
        expected = theirs(x, attention_mask=mask)[0]
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-6, atol=2e-6)
        if layer:
            ours.attn_scale = Unscaled()
            assert (ours(x)[0] - expected).abs().max() > 1e-2
