"""Positions: rotary and sinusoidal."""

import pytest
import torch

from stability_lab.model.rope import rope_table, rotate, sinusoidal_table


def test_rotation_keeps_norms_and_position_zero():
    x = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    y = rotate(x, *rope_table(16, 8, 10_000.0))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(y[:, 0], x[:, 0], rtol=0, atol=0)
    assert not torch.allclose(y[:, 1], x[:, 1])


def test_logits_depend_on_relative_positions_only():
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    table = rope_table(32, 8, 10_000.0)
    q_T = rotate(q.expand(1, 32, 1, 8), *table)[0, :, 0]
    k_T = rotate(k.expand(1, 32, 1, 8), *table)[0, :, 0]
    logits = q_T @ k_T.T
    for distance in range(-31, 32):
        diagonal = logits.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)
    assert logits[0].std() > 0.1


def test_a_shorter_input_uses_the_first_positions():
    x = torch.randn(1, 16, 2, 8)
    table = rope_table(16, 8, 10_000.0)
    torch.testing.assert_close(rotate(x[:, :5], *table), rotate(x, *table)[:, :5], rtol=0, atol=0)


def test_gradient_is_the_rotation_back():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in rope_table(4, 6, 10_000.0))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_low_precision_is_rotated_in_fp32():
    x = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = rope_table(16, 8, 10_000.0)
    y = rotate(x, *table)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, rotate(x.float(), *table).bfloat16())


def test_sinusoidal_table():
    table = sinusoidal_table(8, 4)
    assert table.shape == (8, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[1].tolist() == pytest.approx([0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004], abs=1e-7)
    assert sinusoidal_table(8, 5).shape == (8, 5)


@pytest.mark.oracle
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_equals_llama(theta):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    torch.manual_seed(0)
    q, k = torch.randn(2, 256, 4, 16), torch.randn(2, 256, 2, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(256)[None])
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        # Their angles are computed in fp32, ours in fp64.
        torch.testing.assert_close(rotate(ours, *rope_table(256, 16, theta)), theirs, rtol=0, atol=1e-4)
