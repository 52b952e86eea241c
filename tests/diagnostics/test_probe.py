"""What is measured on fixed batches: statistics of attention logits, and bits per byte."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stability_lab.data.sources.corpus import split_documents
from stability_lab.diagnostics.probe import evaluating, probe_attention, validate
from stability_lab.model.attention import Unwatched
from stability_lab.plugins.instantiate import instantiate
from stability_lab.training.loop import Run


@pytest.fixture(scope="module")
def run(tiny_run) -> Run:
    """Attention logits of several units, larger in some heads than in others."""
    built = tiny_run("model.init.std=0.4")
    with torch.no_grad():
        for block in built.model.blocks:
            block.attn.wq.weight[:8] *= 3  # the first head
    return built


def probe(run: Run) -> dict[str, float]:
    return probe_attention(run.model, run.objective, run.probe_windows)


@torch.no_grad()
def attention_logits(run: Run) -> list[Tensor]:
    """(P, H, T, T) of each layer, in fp64 from the modules' own inputs; the future is -inf."""
    model, inputs = run.model, []
    blocks: Any = model.blocks
    hooks = [b.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for b in blocks]
    model(run.probe_windows[:, :-1])
    for hook in hooks:
        hook.remove()
    logits = []
    for block, x in zip(blocks, inputs, strict=True):
        q, k = (block.attn.rotate(w(x).unflatten(-1, (4, 8))).double() for w in (block.attn.wq, block.attn.wk))
        all_pairs = torch.einsum("bthk,bshk->bhts", q, k) * 8**-0.5
        logits.append(all_pairs.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -math.inf))
    return logits


def test_values_are_those_of_a_naive_computation(run):
    measured, layers = probe(run), attention_logits(run)
    largest_LH = torch.stack([logits.amax((0, 2, 3)) for logits in layers])
    absolute = max(logits.masked_fill(logits == -math.inf, 0.0).abs().max().item() for logits in layers)
    entropy_L = []
    for logits in layers:
        entropy_BHT = torch.special.entr(logits.softmax(-1)).sum(-1)[..., 1:] / torch.arange(2, 17).log()
        entropy_L.append(entropy_BHT.mean().item())
    # The median of four heads is the lower of the middle two, as torch has it.
    spread_L = largest_LH.amax(1) - largest_LH.sort(1).values[:, 1]
    assert spread_L.min() > 1
    rms_L = residual_rms(run)
    assert rms_L[1] > rms_L[0] > 0
    expected = {
        "attn/max_logit": largest_LH.max().item(),
        "attn/max_abs_logit": absolute,
        "attn/max_logit_spread": spread_L.max().item(),
        "attn/entropy": sum(entropy_L) / 2,
        "attn/max_logit/L00": largest_LH[0].max().item(),
        "attn/max_logit/L01": largest_LH[1].max().item(),
        "attn/entropy/L00": entropy_L[0],
        "attn/entropy/L01": entropy_L[1],
        "act/rms/L00": rms_L[0],
        "act/rms/L01": rms_L[1],
        "weight/rms/embed": run.model.embed.weight.double().pow(2).mean().sqrt().item(),
    }
    assert measured.keys() == expected.keys()
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value, rel=1e-4), name


@torch.no_grad()
def residual_rms(run) -> list[float]:
    """Of the stream after each block, which is fed on by hand."""
    model = run.model.eval()
    x = model.embed(run.probe_windows[:, :-1])
    rms = []
    for block in model.blocks:
        x, _ = block(x)
        rms.append(x.double().pow(2).mean().sqrt().item())
    return rms


def test_the_largest_product_of_gains_is_over_layers(tiny_run):
    run = tiny_run("+stabilizer=qknorm")
    assert probe(run)["attn/qk_gain"] == 1
    with torch.no_grad():
        run.model.blocks[1].attn.qk_transform.q_gain[3] = -2.0
        run.model.blocks[1].attn.qk_transform.k_gain[0] = 3.0
        run.model.blocks[0].attn.qk_transform.k_gain[0] = 5.0
    assert probe(run)["attn/qk_gain"] == 6
    assert "attn/qk_gain" not in probe(tiny_run("+stabilizer=qknorm", "stabilizer.qknorm.norm=l2"))


def test_a_probe_leaves_no_hook(run):
    probe(run)
    assert not any(block._forward_hooks for block in run.model.blocks)
    assert all(isinstance(block.attn.watch, Unwatched) for block in run.model.blocks)


def test_equal_heads_have_no_spread_and_no_logits_full_entropy(tiny_run):
    run = tiny_run()
    with torch.no_grad():
        for block in run.model.blocks:
            block.attn.wq.weight.zero_()
    measured = probe(run)
    assert measured["attn/max_logit"] == measured["attn/max_logit_spread"] == 0
    assert measured["attn/entropy"] == pytest.approx(1, rel=1e-6)
    assert measured["attn/entropy/L01"] == pytest.approx(1, rel=1e-6)


def test_a_one_hot_head_has_no_entropy(tiny_run):
    run = tiny_run("model.init.std=0.4")
    with torch.no_grad():
        for block in run.model.blocks:
            block.attn.wq.weight.mul_(1e5)
    assert probe(run)["attn/entropy"] < 1e-3


@pytest.mark.parametrize("layer", [0, 1])
def test_a_nan_is_not_hidden(run, layer):
    broken = copy.deepcopy(run.model)
    with torch.no_grad():
        broken.blocks[layer].attn.wq.weight[-1] = math.nan  # the last head
    measured = probe_attention(broken, run.objective, run.probe_windows)
    for name in ("attn/max_logit", "attn/max_abs_logit", "attn/max_logit_spread", "attn/entropy"):
        assert math.isnan(measured[name]), name
    assert math.isnan(measured[f"attn/max_logit/L{layer:02d}"])
    assert math.isnan(measured["attn/max_logit/L00"]) == (layer == 0)


def test_measuring_leaves_mode_and_gradients_as_they_were(run):
    for training in (True, False):
        run.model.train(training)
        probe(run)
        validate(run.model, run.objective, run.eval_windows, 4, 100)
        assert run.model.training == training
        assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(RuntimeError, match="broke"), evaluating(run.model.train()):
        raise RuntimeError("broke")
    assert run.model.training


@torch.no_grad()
def nats_of(run: Run) -> float:
    """Summed cross-entropy of the validation windows, in fp64."""
    windows = run.eval_windows
    logits = run.model(windows[:, :-1]).logits_BTV.double().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten(), reduction="sum").item()


def test_bits_per_byte_of_bytes(run):
    targets = run.eval_windows[:, 1:]
    n_bytes = int((targets != run.data.eos_id).sum())
    assert run.eval_bytes == n_bytes <= targets.numel()
    measured = validate(run.model, run.objective, run.eval_windows, 3, run.eval_bytes)
    assert measured["val/bits_per_byte"] == pytest.approx(nats_of(run) / math.log(2) / n_bytes, rel=1e-6)


def test_bits_per_byte_of_learned_tokens(tiny_run, tmp_path):
    # The accents make bytes and characters differ; merged early, they are never cut in two.
    file = tmp_path / "text.txt"
    file.write_text("".join(f"Le café nº {n} de l'été {n * n % 97}\n" for n in range(3000)), encoding="utf-8")
    run = tiny_run("tokenizer=bpe", "tokenizer.vocab_size=300", "data=text", f"data.path='{file}'")
    corpus = instantiate(run.config.data, "data")
    train, val = split_documents(corpus.documents(), corpus.val_every)
    tokenizer = instantiate(run.config.tokenizer, "tokenizer").fit(train, tmp_path / "vocabulary.json")
    n_bytes = 0
    for window in run.eval_windows[:, 1:].numpy():
        text = tokenizer.decode(window[window != tokenizer.eos_id])
        assert "\N{REPLACEMENT CHARACTER}" not in text
        n_bytes += len(text.encode())
    assert n_bytes > 1.2 * run.eval_windows[:, 1:].numel()
    assert run.eval_bytes == n_bytes
    measured = validate(run.model, run.objective, run.eval_windows, 16, run.eval_bytes)
    assert measured["val/bits_per_byte"] == pytest.approx(nats_of(run) / math.log(2) / n_bytes, rel=1e-6)
    assert run.data.bytes_of(run.data.val) == run.data.val_bytes == sum(len(text) for _, text in val)
