"""Soft-cap on the head's logits, before log Z; it is not the cap on attention logits."""

import math

import pytest
import torch
from torch import Tensor, nn

from stability_lab.build import build_stabilizers, fill_seams
from stability_lab.diagnostics.probe import watching
from stability_lab.numerics import Cap
from stability_lab.seams import Seams, Site
from stability_lab.stabilizers.final_softcap import FinalSoftCapStabilizer
from stability_lab.stabilizers.softcap import SoftCap, SoftCapStabilizer
from stability_lab.training.loop import Run

WIDE = "model.init.std=1"  # logits of tens at the start


def first_batch(run: Run) -> Tensor:
    return torch.from_numpy(run.sampler.batch(0, 4))


def logits_without_the_cap(run: Run) -> Tensor:
    transform, run.model.logit_transform = run.model.logit_transform, nn.Identity()
    with torch.no_grad():
        logits = run.model(first_batch(run)[:, :-1]).logits_BTV
    run.model.logit_transform = transform
    return logits


@pytest.mark.parametrize(("logit", "value"), [(10, 9.6453821259), (30, 22.8478246787), (100, 29.9237390242)])
def test_published_values(logit, value):
    x = torch.tensor([logit, -logit], dtype=torch.float64, requires_grad=True)
    y = Cap(30.0).double()(x)
    assert y.tolist() == pytest.approx([value, -value], abs=1e-9)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == pytest.approx([1 - math.tanh(logit / 30) ** 2] * 2, rel=1e-12)


def test_low_precision_is_capped_in_fp32():
    y = Cap(30.0)(torch.tensor([100.0], dtype=torch.bfloat16))
    assert y.dtype == torch.float32
    assert y.item() == pytest.approx(29.9237390, abs=1e-5)


def test_no_logit_and_no_log_z_leaves_its_bound(tiny_run, train_steps):
    run = tiny_run("+stabilizer=final_softcap", "stabilizer.final_softcap.cap=5", WIDE)
    assert logits_without_the_cap(run).abs().max() > 20
    with torch.no_grad():
        assert run.model(first_batch(run)[:, :-1]).logits_BTV.abs().max() <= 5
    for row in train_steps(run, 3):
        assert row["train/log_z_max"] <= 5 + math.log(run.data.vocab_size)
    # The bound is met where all logits are at the cap.
    with torch.no_grad():
        run.model.head.weight.zero_()  # type: ignore[union-attr]
        run.model.final_norm.weight.zero_()
        run.model.final_norm.bias.fill_(1.0)
        run.model.head.weight.fill_(100.0)  # type: ignore[union-attr]
    (row,) = train_steps(run, 1)
    assert row["train/log_z_max"] == pytest.approx(5 + math.log(run.data.vocab_size), rel=1e-6)


def test_loss_and_z_loss_see_the_capped_logits(tiny_run, train_steps):
    run = tiny_run("+stabilizer=[final_softcap,zloss]", "stabilizer.final_softcap.cap=5", WIDE)
    capped = 5 * torch.tanh(logits_without_the_cap(run).double() / 5).flatten(0, 1)
    targets = first_batch(run)[:, 1:].flatten()
    log_z = capped.logsumexp(-1)
    (row,) = train_steps(run, 1)
    assert row["train/loss"] == pytest.approx(nn.functional.cross_entropy(capped, targets).item(), rel=1e-5)
    assert row["train/log_z_mean"] == pytest.approx(log_z.mean().item(), rel=1e-5)
    assert row["train/z_raw"] == pytest.approx(log_z.square().mean().item(), rel=1e-5)
    assert row["train/z_loss"] == pytest.approx(1e-4 * log_z.square().mean().item(), rel=1e-5)


def test_the_two_caps_are_never_mixed_up(tiny_config):
    assert FinalSoftCapStabilizer().apply(Seams()).owners == {"logit_transform": ("final_softcap",)}
    assert SoftCapStabilizer().apply(Seams()).owners == {"score_mod": ("softcap",)}
    both = tiny_config("+stabilizer=[softcap,final_softcap]", "stabilizer.final_softcap.cap=5")
    seams = fill_seams(build_stabilizers(both))
    site = Site(0, 1, "attn", 8, n_heads=1, n_kv_heads=1, head_dim=8)
    cap = seams.score_mod(site)
    assert isinstance(cap, SoftCap)
    assert cap.cap == 30
    assert seams.logit_transform(site).cap == 5


def test_attention_is_the_baselines(tiny_run):
    stats: dict[str, list] = {}
    for name in ("none", "final_softcap"):
        run = tiny_run(f"+stabilizer={name}", WIDE)
        assert run.model.backend.name == "sdpa"
        with watching(run.model) as (stats[name], _):
            run.model(first_batch(run)[:, :-1])
    for plain, capped in zip(*stats.values(), strict=True):
        assert torch.equal(plain.max_logit_H, capped.max_logit_H)
        assert capped.score_mod == {}


@pytest.mark.parametrize("cap", [0.0, -30.0, math.inf, math.nan])
def test_bad_caps_are_refused(cap):
    with pytest.raises(ValueError, match=f"^cap={cap:g}: must be positive and finite"):
        FinalSoftCapStabilizer(cap)


@pytest.mark.oracle
def test_equals_gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=65,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=16,
        layer_types=["full_attention"],
        final_logit_softcapping=2.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    theirs = Gemma2ForCausalLM(config).eval()
    nn.init.normal_(theirs.lm_head.weight, std=0.3)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected = theirs(tokens).logits
        config.final_logit_softcapping = None
        plain = theirs(tokens).logits
    assert plain.abs().max() > 2
    torch.testing.assert_close(Cap(2.0)(plain), expected, rtol=1e-6, atol=1e-6)
