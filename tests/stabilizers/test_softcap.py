"""Soft-cap on attention logits: cap * tanh(logit / cap) on scaled logits, before the mask; measured before the cap."""

import math

import pytest
import torch
from torch import Tensor

from stability_lab import cli
from stability_lab.config import ConfigError
from stability_lab.diagnostics.probe import probe_attention
from stability_lab.model import attention as module
from stability_lab.model.attention import explicit_attention, logit_stats
from stability_lab.plugins.instantiate import instantiate
from stability_lab.stabilizers.softcap import SoftCap, SoftCapStabilizer

H, K, T = 4, 8, 16
SCALE = K**-0.5
# (logit, capped at 30, slope there)
PUBLISHED = [
    (10, 9.6453821259, 0.89662956),
    (30, 22.8478246787, 0.41997434),
    (50, 27.933, None),
    (60, 28.9208274023, 0.0706508),
    (100, 29.9237390242, 0.00507760),
]


def capped(cap: float) -> SoftCap:
    return SoftCap(cap).double()


def random_qkv(n_kv_heads: int = H, scale: float = 3.0) -> list[Tensor]:
    """(B, H, T, K) and twice (B, G, T, K)."""
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(2, h, T, K, generator=generator) for h in (H, n_kv_heads, n_kv_heads)]


def visible_logits(q: Tensor, k: Tensor) -> Tensor:
    """Scaled logits (B, H, T, S) in fp64, the textbook way; those of the future are -inf."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("bhtk,bhsk->bhts", q.double(), k.double()) * SCALE
    return logits.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)


@pytest.mark.parametrize(("logit", "value", "slope"), PUBLISHED)
def test_published_values(logit, value, slope):
    x = torch.tensor([logit, -logit], dtype=torch.float64, requires_grad=True)
    y = capped(30)(x)
    assert y[0].item() == pytest.approx(value, abs=5e-4 if slope is None else 1e-9)
    assert y[1].item() == pytest.approx(-y[0].item(), rel=1e-15)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = 1 - math.tanh(logit / 30) ** 2
    assert gradient.tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert capped(30).slope(x.detach()).tolist() == pytest.approx([expected] * 2, rel=1e-12)
    if slope is not None:
        assert expected == pytest.approx(slope, rel=1e-6)


def test_low_precision_is_capped_in_fp32():
    # In bf16 itself 250 would come out as 30 with slope 0.
    y = SoftCap(30.0)(torch.tensor([100.0], dtype=torch.bfloat16))
    assert y.dtype == torch.float32
    assert y.item() == pytest.approx(29.9237390, abs=1e-5)
    assert SoftCap(30.0).slope(torch.tensor([100.0], dtype=torch.bfloat16)).item() == pytest.approx(0.0050776, rel=1e-3)


def test_three_token_example():
    q = torch.tensor([[1, 0], [0, 2], [10, 10]], dtype=torch.float64).view(1, 1, 3, 2)
    k = torch.tensor([[1, 1], [2, -1], [3, 6]], dtype=torch.float64).view(1, 1, 3, 2)
    v = torch.tensor([[1, 0], [0, 1], [2, 2]], dtype=torch.float64).view(1, 1, 3, 2)
    y = explicit_attention(q, k, v, 2**-0.5, score_mod=capped(30))[0, 0]
    assert y[0].tolist() == [1, 0]
    assert y[1].tolist() == pytest.approx([0.9440823779, 0.0559176221], abs=1e-9)
    assert y[2].tolist() == pytest.approx([1.9999998836, 1.9999997679], abs=1e-9)
    # Before the cap: the row's largest logit is 63.6, its log-sum-exp after it 29.15.
    assert logit_stats(q, k, 2**-0.5, score_mod=capped(30)).max_logit_H.item() == pytest.approx(63.6396103068, rel=1e-6)
    scores = capped(30)((q[0, 0, 2] @ k[0, 0].T) * 2**-0.5)
    assert scores.logsumexp(-1).item() == pytest.approx(29.1500379636, abs=1e-9)


@pytest.mark.parametrize("block", [256, 5])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_attention_with_it_is_the_textbook_formula(monkeypatch, block, n_kv_heads):
    """On scaled logits, then the mask, then the softmax; forward and backward."""
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    q, k, v = (x.double().requires_grad_() for x in random_qkv(n_kv_heads))
    logits = visible_logits(q, k)
    weights = (2.0 * torch.tanh(logits / 2.0)).masked_fill(logits == -math.inf, -math.inf).softmax(-1)
    expected = weights @ v.repeat_interleave(H // n_kv_heads, dim=1)
    got = explicit_attention(q, k, v, SCALE, score_mod=capped(2))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    weighting = torch.linspace(-1, 1, got.numel()).view_as(got).double()
    for a, b in zip(*(torch.autograd.grad((y * weighting).sum(), (q, k, v)) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_the_future_stays_invisible_where_every_logit_is_very_negative():
    # Mask first and cap then would lift the future's -inf to -cap, as high as what may be seen.
    q, v = torch.full((1, H, T, K), 100.0), torch.randn(1, H, T, K).requires_grad_()
    y = explicit_attention(q, -q, v, SCALE, score_mod=SoftCap(30.0))
    assert logit_stats(q, -q, SCALE).max_logit_H.amax() < -1e4
    for t in (0, 7, 15):
        (gradient,) = torch.autograd.grad(y[0, :, t].sum(), v, retain_graph=True)
        assert gradient[0, :, t + 1 :].eq(0).all()
        torch.testing.assert_close(gradient[0, :, : t + 1], torch.full((H, t + 1, K), 1 / (t + 1)))


@pytest.mark.parametrize("block", [256, 5])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_shares_are_those_of_a_naive_computation(monkeypatch, block, n_kv_heads):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    q, k, _ = random_qkv(n_kv_heads)
    cap = 4.0
    stats = logit_stats(q, k, SCALE, score_mod=SoftCap(cap))
    logits = visible_logits(q, k)
    seen = logits > -math.inf
    weights = (cap * torch.tanh(logits / cap)).masked_fill(~seen, -math.inf).softmax(-1)
    passed = weights * (1 - torch.tanh(logits / cap) ** 2)
    expected = {"pass": (passed[seen].sum() / weights[seen].sum()).item()}
    for name, limit in (("touched", cap / 2), ("saturated", 2 * cap)):
        inside = seen & (logits.abs() > limit)
        assert inside.sum() > 20
        expected[f"share/{name}"] = (inside.sum() / seen.sum()).item()
        expected[f"pass/{name}"] = (passed[inside].sum() / weights[inside].sum()).item()
    assert stats.score_mod.keys() == expected.keys()
    for name, value in expected.items():
        assert stats.score_mod[name].item() == pytest.approx(value, rel=1e-4), name
    assert stats.score_mod["pass/saturated"] < stats.score_mod["pass/touched"] < stats.score_mod["pass"] < 1
    # The largest logits are those without a cap, the entropy is that of the weights in use.
    for key in ("max_logit_H", "max_abs_logit_H"):
        assert torch.equal(getattr(stats, key), getattr(logit_stats(q, k, SCALE), key))
    entropy_BHT = torch.special.entr(weights).sum(-1)[..., 1:] / torch.arange(2, T + 1).log()
    torch.testing.assert_close(stats.entropy_H.double(), entropy_BHT.mean((0, 2)), rtol=1e-4, atol=1e-5)


def test_an_empty_region_passes_no_number():
    q, k, _ = random_qkv(scale=0.1)
    shares = logit_stats(q, k, SCALE, score_mod=SoftCap(30.0)).score_mod
    assert shares["share/touched"] == shares["share/saturated"] == 0
    assert shares["pass/touched"].isnan()
    assert shares["pass/saturated"].isnan()
    assert shares["pass"].item() == pytest.approx(1, abs=1e-4)


def test_the_probe_shows_the_logits_before_the_cap_and_what_it_does_to_them(tiny_run):
    wide = "model.init.std=1"
    run, control = (tiny_run(f"+stabilizer={name}", wide, "model.attention=explicit") for name in ("softcap", "none"))
    measured, plain = (probe_attention(r.model, r.objective, r.probe_windows) for r in (run, control))
    assert measured["attn/max_logit/L00"] == plain["attn/max_logit/L00"] > 30
    assert 0 < measured["attn/score_mod/share/saturated"] < measured["attn/score_mod/share/touched"] < 1
    assert measured["attn/score_mod/pass/saturated"] < 0.1 < measured["attn/score_mod/pass"] < 1
    assert not any(key.startswith("attn/score_mod") for key in plain)
    calm = tiny_run("+stabilizer=softcap")
    shares = probe_attention(calm.model, calm.objective, calm.probe_windows)
    assert shares["attn/score_mod/share/touched"] == 0
    assert math.isnan(shares["attn/score_mod/pass/touched"])


def test_a_huge_cap_equals_none_to_rounding(tiny_run):
    results = []
    for words in (("+stabilizer=softcap", "stabilizer.softcap.cap=1e6"), ("+stabilizer=none",)):
        run = tiny_run(*words, "model.init.std=0.3", "model.attention=explicit")
        tokens = torch.from_numpy(run.sampler.batch(0, 4))
        sums, _ = run.step.forward(run.objective.batch(tokens, 0), torch.tensor(1 / 64))
        sums.objective.backward()
        results.append([sums.objective.detach(), *(p.grad for p in run.model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_one_cap_serves_all_layers(tiny_run):
    model = tiny_run("+stabilizer=softcap", "stabilizer.softcap.cap=7").model
    first, second = (block.attn.score_mod for block in model.blocks)
    assert first is second
    assert first.cap == 7
    assert "cap=7" in str(model)


@pytest.mark.parametrize("cap", [0.0, -30.0, math.inf, math.nan])
def test_bad_caps_are_refused(cap):
    with pytest.raises(ValueError, match=f"^cap={cap:g}: must be positive and finite"):
        SoftCapStabilizer(cap)


@pytest.mark.parametrize("cap", [0, -30, math.inf, math.nan, None, "abc"])
@pytest.mark.parametrize("name", ["softcap", "final_softcap"])
def test_bad_caps_of_a_config_name_their_key(tiny_config, name, cap):
    node = dict(tiny_config("+stabilizer=[softcap,final_softcap]").stabilizer[name])
    shown = "null" if cap is None else cap
    with pytest.raises(ConfigError, match=rf"^stabilizer\.{name}\.cap={shown}: must be "):
        instantiate({**node, "cap": cap}, f"stabilizer.{name}")


@pytest.mark.parametrize(("name", "cap"), [("softcap", "0"), ("final_softcap", "null")])
def test_a_bad_cap_ends_the_command_with_one_sentence(name, cap, tiny_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", *tiny_overrides, f"+stabilizer={name}", f"stabilizer.{name}.cap={cap}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: stabilizer.{name}.cap={cap}: must be ")
    assert len(shown.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.oracle
@pytest.mark.parametrize("cap", [2.0, 30.0])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_equals_gemma2(cap, n_kv_heads):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v = random_qkv(n_kv_heads, scale=4.0)
    attention = torch.nn.Module().eval()
    attention.num_key_value_groups = H // n_kv_heads  # type: ignore[assignment]
    mask = torch.full((T, T), -torch.inf).triu(1).view(1, 1, T, T)
    expected, _ = eager_attention_forward(attention, q, k, v, mask, scaling=SCALE, softcap=cap)
    got = explicit_attention(q, k, v, SCALE, score_mod=SoftCap(cap)).transpose(1, 2)
    assert (got - explicit_attention(q, k, v, SCALE).transpose(1, 2)).abs().max() > 1e-2
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
