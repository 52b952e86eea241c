"""Peri-norm: x = x + norm(f(norm(x))), as in Gemma 2, and a final norm."""

import pytest
import torch
from torch import Tensor, nn

from stability_lab.model.block import MLP, Block
from stability_lab.model.rope import Rope
from stability_lab.model.transformer import site_of
from stability_lab.seams import Placement, Seams
from stability_lab.stabilizers.perinorm import PeriNorm
from stability_lab.stabilizers.rmsnorm import RMSNormStabilizer


def test_placement():
    seams = PeriNorm().apply(Seams())
    assert seams.norm_placement == Placement(pre=True, branch=True, residual=False, final=True)
    assert seams.owners == {"norm_placement": ("perinorm",)}


def test_which_norms_exist(tiny_run):
    model = tiny_run("+stabilizer=perinorm").model
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    kinds = ("attn_norm", "mlp_norm", "attn_branch_norm", "mlp_branch_norm")
    assert norms == {f"blocks.{i}.{kind}" for i in range(2) for kind in kinds} | {"final_norm"}
    first, second = model.blocks[0].attn_norm, model.blocks[0].attn_branch_norm
    assert first.weight is not second.weight


def layer_norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (32,))


def test_neither_the_size_of_the_stream_nor_of_the_weights_reaches_what_a_branch_adds(tiny_config):
    torch.manual_seed(0)
    block = Block(tiny_config().model, site_of(tiny_config().model).at("attn", 0), PeriNorm().apply(Seams()), "sdpa")
    with torch.no_grad():
        for matrix in (block.attn.wo, block.mlp.w_down):
            matrix.weight.mul_(10)
    x = torch.randn(2, 16, 32)
    y, _ = block(x)
    middle = x + layer_norm(block.attn(layer_norm(x))[0])
    torch.testing.assert_close(y, middle + layer_norm(block.mlp(layer_norm(middle))), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for matrix in (block.attn.wo, block.mlp.w_down):
            matrix.weight.mul_(100)
    torch.testing.assert_close(block(x)[0], y, rtol=1e-3, atol=1e-3)
    # A stream of a hundred times the size hears each branch as it was: RMS 1 in all.
    added = block(100 * x)[0] - 100 * x
    attended = middle - x
    torch.testing.assert_close(
        added, attended + layer_norm(block.mlp(layer_norm(100 * x + attended))), rtol=1e-3, atol=1e-3
    )


@pytest.mark.oracle
def test_equals_gemma2(tiny_config):
    """Gemma 2's layer with our MLP in the place of its GeGLU, which we have not."""
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding

    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=16,
        layer_types=["full_attention"],
        attn_logit_softcapping=None,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    model = tiny_config("model.n_kv_heads=2").model
    theirs = Gemma2DecoderLayer(config, 0).eval()
    theirs.mlp = MLP(model)  # type: ignore[assignment]
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    seams = RMSNormStabilizer(eps=1e-6).apply(PeriNorm().apply(Seams()))
    ours = Block(model, site_of(model).at("attn", 0), seams, "sdpa", Rope(16, 8, 10_000.0))
    names = {
        "attn.wq": "self_attn.q_proj",
        "attn.wk": "self_attn.k_proj",
        "attn.wv": "self_attn.v_proj",
        "attn.wo": "self_attn.o_proj",
        "mlp.w_up": "mlp.w_up",
        "mlp.w_down": "mlp.w_down",
        "attn_norm": "input_layernorm",
        "attn_branch_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_branch_norm": "post_feedforward_layernorm",
    }
    weights = theirs.state_dict()
    # Their gain is 1 + weight.
    ours.load_state_dict({f"{a}.weight": weights[f"{b}.weight"] + float("norm" in a) for a, b in names.items()})
    x = torch.randn(2, 16, 32)
    positions = Gemma2RotaryEmbedding(config)(x, torch.arange(16)[None])
    mask = torch.full((16, 16), -torch.inf).triu(1).expand(2, 1, 16, 16)
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask, position_embeddings=positions)
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=5e-6)
