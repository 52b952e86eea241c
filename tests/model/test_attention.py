"""Attention: causal, the same on both paths, and measured exactly."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from stability_lab.diagnostics.probe import watching
from stability_lab.model import attention as module
from stability_lab.model.attention import Attention, explicit_attention, logit_bound, logit_stats
from stability_lab.model.backend import choose_backend
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT, site_of
from stability_lab.seams import Seams

H, K, T = 4, 8, 16
SCALE = K**-0.5


def random_qkv(n_kv_heads: int = H, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, T, K) and twice (B, G, T, K), to be differentiated."""
    generator = torch.Generator().manual_seed(0)
    shapes = (H, n_kv_heads, n_kv_heads)
    return tuple((scale * torch.randn(2, h, T, K, generator=generator)).requires_grad_() for h in shapes)  # type: ignore


def all_logits(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, S), the textbook way, in fp64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.einsum("bhtk,bhsk->bhts", q.double(), k.double()) * SCALE


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_causality_by_gradient(tiny_config, backend, n_kv_heads, monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 3)
    config = tiny_config(f"model.attention={backend}", f"model.n_kv_heads={n_kv_heads}", "model.seq_len=8").model
    model = GPT(dataclasses.replace(config, vocab_size=257), Seams())
    initialise(model, 0)
    embedded = torch.randn(1, 8, 32, requires_grad=True)
    model.embed.forward = lambda tokens: embedded  # type: ignore[method-assign]
    logits = model(torch.zeros(1, 8, dtype=torch.int64)).logits_BTV
    for t in range(8):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embedded, retain_graph=True)
        size_S = gradient[0].abs().amax(-1)
        assert size_S[t + 1 :].eq(0).all(), t
        assert size_S[: t + 1].gt(0).all(), t


@pytest.mark.parametrize("block", [256, 16, 5, 1])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_paths_agree_forward_and_backward(tiny_config, monkeypatch, block, n_kv_heads, dtype, tolerance):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    config = tiny_config(f"model.n_kv_heads={n_kv_heads}", "model.bias=true").model
    results = []
    for backend in ("sdpa", "explicit"):
        torch.manual_seed(0)
        layer = Attention(config, site_of(config).at("attn", 0), Seams(), backend).to(dtype)
        x = (3 * torch.randn(2, T, 32, dtype=dtype)).requires_grad_()
        y, bound = layer(x)
        y.square().sum().backward()
        results.append([y, bound, x.grad, *(p.grad for p in layer.parameters())])
    largest = max(value.abs().max().item() for value in results[0])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_explicit_path_is_the_textbook_formula(monkeypatch, n_kv_heads):
    monkeypatch.setattr(module, "QUERY_BLOCK", 5)
    q, k, v = random_qkv(n_kv_heads, scale=3.0)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = all_logits(q, k).masked_fill(future, -math.inf).softmax(-1)
    expected = weights @ v.double().repeat_interleave(H // n_kv_heads, dim=1)
    torch.testing.assert_close(explicit_attention(q, k, v, SCALE).double(), expected, rtol=1e-4, atol=1e-5)


def test_explicit_path_keeps_logits_in_fp32():
    q, k, v = (x.detach().bfloat16() for x in random_qkv(scale=3.0))
    with torch.autocast("cpu", torch.bfloat16):
        y = explicit_attention(q, k, v, SCALE)
    exact = explicit_attention(q.double(), k.double(), v.double(), SCALE)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 * 1.01, atol=1e-5)


@pytest.mark.parametrize("block", [256, 5])
def test_dropout_acts_in_training_only(tiny_config, monkeypatch, block):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    config = tiny_config("model.dropout=0.5").model
    for backend in ("sdpa", "explicit"):
        torch.manual_seed(0)
        layer, x = Attention(config, site_of(config).at("attn", 0), Seams(), backend), torch.randn(2, T, 32)
        assert not torch.equal(layer(x)[0], layer(x)[0])
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_bound_is_never_below_the_largest_logit(n_kv_heads, scale):
    q, k, _ = random_qkv(n_kv_heads, scale=scale)
    bound = logit_bound(q.transpose(1, 2), k.transpose(1, 2), SCALE).item()
    largest = all_logits(q, k).abs().max().item()
    assert largest <= bound * (1 + 1e-6)
    assert bound < 10 * largest
    # Parallel vectors meet it.
    bound = logit_bound(q.transpose(1, 2), 2 * q.transpose(1, 2), SCALE).item()
    assert all_logits(q, 2 * q).max().item() == pytest.approx(bound, rel=1e-5)


def test_bound_pairs_each_query_head_with_its_own_keys():
    q, k = torch.ones(1, 1, 4, K), torch.ones(1, 1, 2, K)
    q[:, :, 0] *= 100  # heads 0 and 1 read key head 0
    k[:, :, 1] *= 100
    assert logit_bound(q, k, SCALE).item() == pytest.approx(100 * K * SCALE, rel=1e-6)


@pytest.mark.parametrize("block", [256, 5])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_statistics_equal_a_full_computation(monkeypatch, block, n_kv_heads):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    q, k, _ = random_qkv(n_kv_heads)
    k = k.detach().clone()
    k[:, :, -1] *= 1e3  # only the last query may see it
    q = q.detach().clone()
    q[:, 1, : T - 1] *= 50
    logits = all_logits(q, k)
    past = torch.ones(T, T, dtype=torch.bool).tril()
    entropy_BHT = torch.stack(
        [torch.distributions.Categorical(logits=logits[..., t, : t + 1]).entropy() for t in range(T)], -1
    )
    normalised_BHT = entropy_BHT[..., 1:] / torch.arange(2, T + 1).log()
    stats = logit_stats(q, k, SCALE)
    rows = logits.transpose(0, 1)[..., past].flatten(1)
    torch.testing.assert_close(stats.max_logit_H.double(), rows.amax(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.max_abs_logit_H.double(), rows.abs().amax(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy_H.double(), normalised_BHT.mean((0, 2)), rtol=1e-4, atol=1e-5)


def test_largest_logit_is_signed():
    q = torch.ones(1, H, T, K)
    stats = logit_stats(q, -q, SCALE)
    torch.testing.assert_close(stats.max_logit_H, torch.full((H,), -K * SCALE))
    torch.testing.assert_close(stats.max_abs_logit_H, torch.full((H,), K * SCALE))
    torch.testing.assert_close(stats.entropy_H, torch.ones(H))  # uniform


def test_one_token_has_statistics():
    stats = logit_stats(torch.ones(1, H, 1, K), torch.ones(1, H, 1, K), SCALE)
    assert stats.entropy_H.eq(0).all()
    torch.testing.assert_close(stats.max_logit_H, torch.full((H,), K * SCALE))


def test_three_token_example():
    q = torch.tensor([[1, 0], [0, 2], [10, 10]], dtype=torch.float64).view(1, 1, 3, 2)
    k = torch.tensor([[1, 1], [2, -1], [3, 6]], dtype=torch.float64).view(1, 1, 3, 2)
    v = torch.tensor([[1, 0], [0, 1], [2, 2]], dtype=torch.float64).view(1, 1, 3, 2)
    y = explicit_attention(q, k, v, 2**-0.5)[0, 0]
    assert y[0].tolist() == [1, 0]
    assert y[1].tolist() == pytest.approx([0.9441927808, 0.0558072192], abs=1e-9)
    assert y[2].tolist() == pytest.approx([2, 2], abs=1e-9)
    assert logit_stats(q, k, 2**-0.5).max_logit_H.item() == pytest.approx(63.6396103068, rel=1e-6)


def test_probe_of_a_layer_sees_what_the_layer_uses(tiny_config):
    config = tiny_config().model
    layer = Attention(config, site_of(config).at("attn", 0), Seams(), "sdpa")
    with watching(layer) as (stats, _):
        _, bound = layer(torch.randn(2, T, 32))
    assert 0 < stats[0].max_abs_logit_H.amax() <= bound * (1 + 1e-6)


def test_backend_is_chosen_once():
    assert choose_backend("auto", Seams()).name == "sdpa"
    assert choose_backend("explicit", Seams()) == ("explicit", "model.attention=explicit")
