"""LayerNorm scaling: a branch's input, and not its output, shrinks with 1/sqrt(layer), layers counted from 1."""

import pytest
import torch
from torch import Tensor, nn

from stability_lab import cli
from stability_lab.diagnostics.probe import probe_attention
from stability_lab.model.block import Block
from stability_lab.model.transformer import site_of
from stability_lab.seams import Scale, Seams, Site
from stability_lab.stabilizers.ln_scaling import LNScaling

NAME = "+stabilizer=ln_scaling"
WIDE = "model.init.std=0.5"


@pytest.mark.parametrize(("layer", "factor"), [(0, 1.0), (1, 2**-0.5), (3, 0.5), (8, 1 / 3)])
def test_factor(layer, factor):
    module = LNScaling().apply(Seams()).norm_scale(Site(layer, 9, "mlp", 8, n_heads=1, n_kv_heads=1, head_dim=8))
    assert isinstance(module, Scale)
    torch.testing.assert_close(module(torch.ones(3)), torch.full((3,), factor), rtol=1e-7, atol=0)


def test_it_acts_on_the_input_of_both_branches(tiny_config):
    config = tiny_config("model.n_layers=4").model
    torch.manual_seed(0)
    block = Block(config, site_of(config).at("attn", 3), LNScaling().apply(Seams()), "sdpa")
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    x = torch.randn(2, 16, 32)
    middle = x + block.attn(block.attn_norm(x) / 2)[0]
    expected = middle + block.mlp(block.mlp_norm(middle) / 2)
    torch.testing.assert_close(block(x)[0], expected, rtol=1e-5, atol=1e-5)
    # With attention and GELU in the branch the same factor on its output is another function.
    on_output = x + block.attn(block.attn_norm(x))[0] / 2
    on_output = on_output + block.mlp(block.mlp_norm(on_output)) / 2
    assert (on_output - expected).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("also", [[], ["rmsnorm"], ["perinorm"]], ids=str)
def test_largest_logit_of_the_second_layer_is_half_the_baselines(tiny_run, also):
    scaled = tiny_run(f"+stabilizer=[{','.join(['ln_scaling', *also])}]", WIDE)
    baseline = tiny_run(f"+stabilizer=[{','.join(also)}]", WIDE)
    ours, theirs = (probe_attention(run.model, run.objective, run.probe_windows) for run in (scaled, baseline))
    assert theirs["attn/max_logit/L01"] > 0.1
    assert ours["attn/max_logit/L00"] == theirs["attn/max_logit/L00"]
    assert ours["attn/max_logit/L01"] == pytest.approx(theirs["attn/max_logit/L01"] / 2, rel=1e-5)


def test_no_other_norm_is_scaled(tiny_run):
    """The final norm's output and that of perinorm's branch norms keep an RMS of 1."""
    model = tiny_run("+stabilizer=[ln_scaling,perinorm]", WIDE).model
    sizes = {}

    def measure(name: str) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            sizes[name] = output.square().mean().item()

        model.get_submodule(name).register_forward_hook(hook)

    names = ["final_norm", "blocks.1.attn_branch_norm", "blocks.1.mlp_branch_norm"]
    for name in names:
        measure(name)
    model(torch.arange(32).view(2, 16))
    assert list(sizes) == [*names[1:], names[0]]
    for name, size in sizes.items():
        assert size == pytest.approx(1, abs=1e-2), name


@pytest.mark.parametrize("placement", ["postnorm", "reordered_norm"])
def test_it_is_refused_without_a_pre_norm(placement, tiny_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", *tiny_overrides, f"+stabilizer=[{placement},ln_scaling]"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: stabilizer=[")
    for word in ("ln_scaling", placement, "'norm_scale'", "'norm_placement'"):
        assert word in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
