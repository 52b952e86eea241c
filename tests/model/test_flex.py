"""FlexAttention: the same attention as the explicit path, one compilation for many layers and runs.

Its backward pass needs CUDA (tests/gpu/test_gpu_flex.py). Here the forward pass runs on CPU: through dynamo's `eager`
back-end, which computes it without a kernel, and in one slow test through the compiler.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from stability_lab.build import build_stabilizers, fill_seams
from stability_lab.config import ConfigError
from stability_lab.model import flex
from stability_lab.model.attention import explicit_attention
from stability_lab.model.flex import flex_attention, on_scores
from stability_lab.model.init import initialise
from stability_lab.model.transformer import GPT
from stability_lab.stabilizers.softcap import SoftCap

H, K = 4, 16


@pytest.fixture
def without_kernels(monkeypatch):
    """As `flex._compiled`, except that dynamo's result is computed without a kernel."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, **{**options, "backend": "eager"}))
    flex._compiled.cache_clear()
    torch.compiler.reset()
    yield
    flex._compiled.cache_clear()
    torch.compiler.reset()


def random_qkv(n_kv_heads: int, T: int, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(batch, h, T, K, generator=generator) for h in (H, n_kv_heads, n_kv_heads)]


def causal(T: int) -> BlockMask:
    return flex.block_mask(True, None, None, T, torch.device("cpu"))


@torch.no_grad()
def largest_error(n_kv_heads: int, T: int, cap: float | None) -> float:
    score_mod = None if cap is None else SoftCap(cap, fused=False)
    q, k, v = random_qkv(n_kv_heads, T)
    got = flex_attention(q, k, v, on_scores(score_mod), n_kv_heads != H, causal(T))
    expected = explicit_attention(q, k, v, K**-0.5, score_mod=score_mod)
    assert got.shape == q.shape
    if cap is not None:
        assert (expected - explicit_attention(q, k, v, K**-0.5)).abs().max() > 0.1
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("cap", [2.0, None])
@pytest.mark.parametrize(("n_kv_heads", "T"), [(4, 16), (2, 128), (1, 200)])
def test_equals_the_explicit_path(without_kernels, n_kv_heads, T, cap):
    assert largest_error(n_kv_heads, T, cap) < 1e-5


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_forward_equals_the_explicit_path():
    torch.compiler.reset()
    assert largest_error(2, 200, 2.0) < 1e-5


def build(config, device_type: str = "cuda") -> GPT:
    model = GPT(dataclasses.replace(config.model, vocab_size=257), fill_seams(build_stabilizers(config)), device_type)
    initialise(model, 0)
    return model


def test_layers_and_runs_share_one_compilation(without_kernels, tiny_config):
    counters.clear()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    # On a CPU the cap has a backward pass of its own, which FlexAttention, in use on CUDA only, does not take.
    plain = ("model.n_heads=2", "model.implementation=reference")
    with torch.no_grad():
        for cap in (5, 50):
            model = build(tiny_config("+stabilizer=softcap", f"stabilizer.softcap.cap={cap}", *plain))
            assert model.backend.name == "flex"
            model(tokens)
    assert counters["stats"]["unique_graphs"] == 1


def test_one_closure_a_map_and_one_mask_a_length():
    score_mod = SoftCap(2.0, fused=False)
    assert flex.on_scores(score_mod) is flex.on_scores(score_mod)
    assert flex.on_scores(score_mod) is not flex.on_scores(SoftCap(2.0, fused=False))
    assert causal(16) is causal(16)
    assert causal(16) is not causal(17)


@pytest.mark.slow
def test_a_sweep_over_shapes_stays_within_the_recompile_limit(without_kernels):
    # A run has four shapes: training, validation, its last batch, and the probe. Three runs of a sweep share a process.
    score_mod = SoftCap(2.0, fused=False)
    with torch.no_grad():
        for batch in range(1, 13):
            q, k, v = random_qkv(H, 16, batch)
            flex_attention(q, k, v, on_scores(score_mod), False, causal(16))


# torch's own tracer instantiates the class of a custom backward pass and warns of it; other warnings are errors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_inside_a_compiled_model_it_is_silent_and_the_same(without_kernels, tiny_config):
    model = build(tiny_config("+stabilizer=softcap", "model.n_heads=2"))
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected = model(tokens).logits_BTV
        got = torch.compile(model, fullgraph=True)(tokens).logits_BTV
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("override", ["model.dropout=0.1", "model.n_heads=4"], ids=["dropout", "head_dim 8"])
def test_what_the_kernel_cannot_do_goes_the_explicit_way_or_is_refused(tiny_config, override):
    """It has no dropout, and a first step with heads below 16 fails: nothing may be dropped, or break that late."""
    config = tiny_config("+stabilizer=softcap", "model.n_heads=2", override)
    assert build(config).backend.name == "explicit"
    forced = tiny_config("+stabilizer=none", "model.n_heads=2", override, "model.attention=flex")
    with pytest.raises(ConfigError, match=r"^model\.attention=flex: "):
        build(forced)
