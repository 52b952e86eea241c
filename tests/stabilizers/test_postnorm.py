"""Post-norm: x = norm(x + f(x)), as in BERT, and no norm before the head."""

import pytest
import torch
from torch import nn

from stability_lab.model.block import Block
from stability_lab.model.transformer import site_of
from stability_lab.seams import Placement, Seams
from stability_lab.stabilizers.postnorm import PostNorm

SEAMS = PostNorm().apply(Seams())


def test_placement():
    assert SEAMS.norm_placement == Placement(pre=False, branch=False, residual=True, final=False)
    assert SEAMS.owners == {"norm_placement": ("postnorm",)}


def test_which_norms_exist(tiny_run):
    model = tiny_run("+stabilizer=postnorm").model
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert norms == {f"blocks.{i}.{branch}_residual_norm" for i in range(2) for branch in ("attn", "mlp")}
    assert isinstance(model.final_norm, nn.Identity)


def test_the_residual_stream_keeps_its_size(tiny_run):
    model = tiny_run("+stabilizer=postnorm", "model.init.std=1").model
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: sizes.append(output[0].square().mean(-1)))
    model(torch.arange(32).view(2, 16))
    assert len(sizes) == 2
    for size_BT in sizes:
        torch.testing.assert_close(size_BT, torch.ones(2, 16), rtol=1e-3, atol=0)


def test_with_rmsnorm(tiny_run):
    model = tiny_run("+stabilizer=[postnorm,rmsnorm]").model
    assert isinstance(model.blocks[1].mlp_residual_norm, nn.RMSNorm)
    assert isinstance(model.blocks[1].mlp_norm, nn.Identity)


@pytest.mark.oracle
def test_equals_bert(tiny_config):
    """BERT's layer under a causal mask."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
    )
    config._attn_implementation = "eager"
    theirs = BertLayer(config).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = tiny_config("model.bias=true").model
    ours = Block(model, site_of(model).at("attn", 0), SEAMS, "sdpa")
    names = {
        "attn.wq": "attention.self.query",
        "attn.wk": "attention.self.key",
        "attn.wv": "attention.self.value",
        "attn.wo": "attention.output.dense",
        "attn_residual_norm": "attention.output.LayerNorm",
        "mlp.w_up": "intermediate.dense",
        "mlp.w_down": "output.dense",
        "mlp_residual_norm": "output.LayerNorm",
    }
    weights = theirs.state_dict()
    ours.load_state_dict(
        {f"{a}.{kind}": weights[f"{b}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    )
    x = torch.randn(2, 16, 32)
    mask = torch.full((16, 16), -torch.inf).triu(1).expand(2, 1, 16, 16)
    with torch.no_grad():
        expected = theirs(x, mask)
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=2e-6)
