"""Reordered norm: x = x + norm(f(x)), as in OLMo 2, and a final norm."""

import pytest
import torch
from torch import Tensor, nn

from stability_lab.model.block import Block
from stability_lab.model.rope import Rope
from stability_lab.model.transformer import site_of
from stability_lab.seams import Placement, Seams
from stability_lab.stabilizers.qknorm import QKNormStabilizer
from stability_lab.stabilizers.reordered_norm import ReorderedNorm
from stability_lab.stabilizers.rmsnorm import RMSNormStabilizer


def test_placement():
    seams = ReorderedNorm().apply(Seams())
    assert seams.norm_placement == Placement(pre=False, branch=True, residual=False, final=True)
    assert seams.owners == {"norm_placement": ("reordered_norm",)}


def test_which_norms_exist(tiny_run):
    model = tiny_run("+stabilizer=reordered_norm").model
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    branches = {f"blocks.{i}.{branch}_branch_norm" for i in range(2) for branch in ("attn", "mlp")}
    assert norms == branches | {"final_norm"}


def layer_norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (32,))


def test_the_size_of_a_branchs_weights_does_not_matter(tiny_config):
    """What a branch adds to the stream has an RMS of 1; the branch's input is the stream as it is."""
    torch.manual_seed(0)
    block = Block(
        tiny_config().model, site_of(tiny_config().model).at("attn", 0), ReorderedNorm().apply(Seams()), "sdpa"
    )
    with torch.no_grad():
        for matrix in (block.attn.wo, block.mlp.w_down):
            matrix.weight.mul_(10)
    x = torch.randn(2, 16, 32)
    y, _ = block(x)
    middle = x + layer_norm(block.attn(x)[0])
    torch.testing.assert_close(y, middle + layer_norm(block.mlp(middle)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((middle - x).square().mean(-1), torch.ones(2, 16), rtol=1e-2, atol=0)
    with torch.no_grad():
        for matrix in (block.attn.wo, block.mlp.w_down):
            matrix.weight.mul_(100)
    torch.testing.assert_close(block(x)[0], y, rtol=1e-3, atol=1e-3)


@pytest.mark.oracle
def test_equals_olmo2(tiny_config):
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding

    config = Olmo2Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        pad_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    theirs = Olmo2DecoderLayer(config, 0).eval()
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    seams = Seams()
    for stabilizer in (ReorderedNorm(), RMSNormStabilizer(eps=1e-6), QKNormStabilizer(scope="full")):
        seams = stabilizer.apply(seams)
    model = tiny_config("model.n_kv_heads=2", "model.mlp=swiglu", "model.d_ff=64").model
    ours = Block(model, site_of(model).at("attn", 0), seams, "sdpa", Rope(16, 8, 10_000.0))
    names = {
        "attn.wq.weight": "self_attn.q_proj.weight",
        "attn.wk.weight": "self_attn.k_proj.weight",
        "attn.wv.weight": "self_attn.v_proj.weight",
        "attn.wo.weight": "self_attn.o_proj.weight",
        "attn.qk_transform.q_gain": "self_attn.q_norm.weight",
        "attn.qk_transform.k_gain": "self_attn.k_norm.weight",
        "mlp.w_gate.weight": "mlp.gate_proj.weight",
        "mlp.w_up.weight": "mlp.up_proj.weight",
        "mlp.w_down.weight": "mlp.down_proj.weight",
        "attn_branch_norm.weight": "post_attention_layernorm.weight",
        "mlp_branch_norm.weight": "post_feedforward_layernorm.weight",
    }
    weights = theirs.state_dict()
    ours.load_state_dict({a: weights[b] for a, b in names.items()})
    x = torch.randn(2, 16, 32)
    positions = Olmo2RotaryEmbedding(config)(x, torch.arange(16)[None])
    mask = torch.full((16, 16), -torch.inf).triu(1).expand(2, 1, 16, 16)
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask, position_embeddings=positions)
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=2e-6)
