"""The scale of the dot product: 1/sqrt(head_dim), none or 1/head_dim."""

import pytest
import torch
from torch import nn

from stability_lab.diagnostics.probe import probe_attention
from stability_lab.model.attention import Attention
from stability_lab.model.transformer import site_of
from stability_lab.seams import Seams, Site
from stability_lab.stabilizers.attn_scale import AttnScale

NAME, KEY = "+stabilizer=attn_scale", "stabilizer.attn_scale.mode"
WIDE = "model.init.std=0.5"


def factor(mode: str, head_dim: int) -> float:
    found = AttnScale(mode).apply(Seams()).attn_scale(Site(2, 4, "attn", 4 * head_dim, 4, 2, head_dim)).factor
    assert found is not None
    return found.item()


@pytest.mark.parametrize("head_dim", [4, 8, 64])
def test_total_scale(head_dim):
    for mode, total in (("sqrt", head_dim**-0.5), ("none", 1.0), ("inverse_d", 1 / head_dim)):
        assert factor(mode, head_dim) * head_dim**-0.5 == pytest.approx(total, rel=1e-7), mode


def test_sqrt_equals_the_baseline_bit_for_bit(tiny_run):
    results = []
    for words in ((NAME, f"{KEY}=sqrt"), ()):
        run = tiny_run(*words, WIDE)
        tokens = torch.from_numpy(run.sampler.batch(0, 4))
        sums, bound = run.step.forward(run.objective.batch(tokens, 0), torch.tensor(1 / 64))
        sums.objective.backward()
        results.append([sums.objective, bound, *(p.grad for p in run.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_logits_of_every_layer_follow(tiny_run):
    # Two heads of 16, whose root is a power of two: the logits differ by exactly 4.
    heads = "model.n_heads=2"
    measured = {}
    for mode in ("sqrt", "none", "inverse_d"):
        run = tiny_run(NAME, f"{KEY}={mode}", heads, WIDE)
        measured[mode] = probe_attention(run.model, run.objective, run.probe_windows)
    logit = "attn/max_logit/L00"
    assert measured["none"][logit] == 4 * measured["sqrt"][logit] == 16 * measured["inverse_d"][logit] > 1
    assert [measured[mode]["attn/scale/L01"] for mode in measured] == [1, 4, 0.25]
    entropy = "attn/entropy/L00"
    assert measured["none"][entropy] < measured["sqrt"][entropy] < measured["inverse_d"][entropy]


@pytest.mark.parametrize("mode", ["nonsense", "", "inverse_layer"])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match=f"^mode={mode}: must be one of sqrt, none, inverse_d"):
        AttnScale(mode)


@pytest.mark.oracle
@pytest.mark.parametrize(("mode", "scale"), [("none", 1.0), ("inverse_d", 1 / 8)])
@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_equals_torch_with_that_scale(tiny_config, mode, scale, backend):
    config = tiny_config().model
    layer = Attention(config, site_of(config).at("attn", 1), AttnScale(mode).apply(Seams()), backend)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 16, 32)
    q, k, v = (w(x).view(2, 16, 4, 8).transpose(1, 2) for w in (layer.wq, layer.wk, layer.wv))
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    expected = layer.wo(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-5)
