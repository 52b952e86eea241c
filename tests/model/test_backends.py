"""Which attention back-end is chosen, why, and what is refused: no stabilizer is ever dropped."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from stability_lab import cli
from stability_lab.build import build_stabilizers, fill_seams
from stability_lab.config import ConfigError
from stability_lab.machine.precision import autocast
from stability_lab.model.backend import Backend, choose_backend
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams

CAP = "+stabilizer=[qknorm,softcap]"
RESTORE = ("+stabilizer=dynamic_scaling", "stabilizer.dynamic_scaling.mode=query_key_layer")
SETS = {"none": ("+stabilizer=none",), "cap": (CAP,), "restore": RESTORE}


@pytest.fixture(scope="module")
def backend_of(tiny_config):
    """`backend_of(set, requested, device type, precision)`: of a model with two heads of 16, which Flex can do."""

    def backend(name: str, requested: str, device_type: str, precision: str) -> Backend:
        config = tiny_config(*SETS[name], "model.n_heads=2")
        model = dataclasses.replace(config.model, vocab_size=65, attention=requested)
        with torch.device("meta"):
            return GPT(model, fill_seams(build_stabilizers(config)), device_type, precision).backend

    return backend


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "requested", "device_type", "chosen", "reason"),
    [
        ("none", "auto", "cpu", "sdpa", "no stabilizer acts on single attention logits"),
        ("none", "auto", "cuda", "sdpa", "no stabilizer acts on single attention logits"),
        ("none", "sdpa", "cpu", "sdpa", "model.attention=sdpa"),
        ("none", "explicit", "cpu", "explicit", "model.attention=explicit"),
        ("none", "explicit", "cuda", "explicit", "model.attention=explicit"),
        ("none", "flex", "cuda", "flex", "model.attention=flex"),
        ("cap", "auto", "cpu", "explicit", "softcap acts on single attention logits"),
        ("cap", "auto", "cuda", "flex", "softcap acts on single attention logits"),
        ("cap", "explicit", "cpu", "explicit", "model.attention=explicit"),
        ("cap", "explicit", "cuda", "explicit", "model.attention=explicit"),
        ("cap", "flex", "cuda", "flex", "model.attention=flex"),
    ],
)
def test_choice(backend_of, name, requested, device_type, precision, chosen, reason):
    backend = backend_of(name, requested, device_type, precision)
    short_bf16 = (name, requested, device_type, precision) == ("none", "auto", "cpu", "bf16")
    assert backend.name == ("sdpa_fp32" if short_bf16 else chosen)
    assert backend.reason.startswith(reason)


def test_a_cap_in_fp64_is_explicit_on_cuda(backend_of):
    backend = backend_of("cap", "auto", "cuda", "fp64")
    assert backend.name == "explicit"
    assert backend.reason.endswith("FlexAttention has no fp64 (trainer.precision=fp64)")
    assert backend_of("none", "auto", "cuda", "fp64").name == "sdpa"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("requested", ["auto", "explicit"])
def test_logits_that_are_formed_in_fp16_are_explicit(backend_of, requested, device_type):
    backend = backend_of("restore", requested, device_type, "fp16")
    assert backend == ("explicit", "dynamic_scaling forms logits in fp16")


@pytest.mark.parametrize(
    ("name", "requested", "device_type", "precision", "sentence"),
    [
        ("cap", "sdpa", "cpu", "fp32", r"model\.attention=sdpa: fused attention cannot apply stabilizer softcap"),
        ("cap", "sdpa", "cuda", "bf16", r"model\.attention=sdpa: fused attention cannot apply stabilizer softcap"),
        ("none", "flex", "cpu", "fp32", r"model\.attention=flex: FlexAttention has no backward pass on CPU"),
        ("cap", "flex", "cpu", "fp32", r"model\.attention=flex: FlexAttention has no backward pass on CPU"),
        ("cap", "flex", "cuda", "fp64", r"model\.attention=flex: FlexAttention has no fp64"),
        ("restore", "auto", "cuda", "fp32", r"trainer\.precision=fp32: stabilizer dynamic_scaling .* trainer\.prec"),
        ("restore", "auto", "cuda", "bf16", r"trainer\.precision=bf16: stabilizer dynamic_scaling .* trainer\.prec"),
        ("restore", "sdpa", "cuda", "fp16", r"model\.attention=sdpa: stabilizer dynamic_scaling .*explicit logits"),
        ("restore", "flex", "cuda", "fp16", r"model\.attention=flex: stabilizer dynamic_scaling .*explicit logits"),
    ],
)
def test_refusals(backend_of, name, requested, device_type, precision, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        backend_of(name, requested, device_type, precision)


def test_every_layer_has_the_chosen_backend(tiny_run):
    model = tiny_run(CAP).model
    assert model.backend.name == "explicit"
    assert [block.attn.backend for block in model.blocks] == ["explicit"] * 2
    assert "backend=explicit" in str(model)


@pytest.mark.parametrize("words", [("model.attention=sdpa", "+stabilizer=softcap"), ("model.attention=flex",)], ids=str)
def test_a_refusal_ends_the_command_with_one_sentence(words, tiny_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", *tiny_overrides, *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {words[0]}: ")
    assert len(shown.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_log_and_manifest_say_what_and_why(tiny_overrides, tmp_path, capsys):
    words = ("+stabilizer=softcap", "trainer.max_steps=1", "trainer.save_weights=false", f"output_dir={tmp_path}")
    assert cli.run(["train", *tiny_overrides, *words]) == 0
    (manifest,) = tmp_path.rglob("manifest.json")
    attention = json.loads(manifest.read_text(encoding="utf-8"))["attention"]
    assert attention["backend"] == "explicit"
    assert attention["reason"].startswith("softcap acts on single attention logits")
    assert f"attention explicit ({attention['reason']})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "precision", "tokens", "name"),
    [
        ("cpu", "bf16", 256, "sdpa_fp32"),
        ("cpu", "bf16", 257, "sdpa"),
        ("cpu", "fp32", 256, "sdpa"),
        ("cuda", "bf16", 256, "sdpa"),
    ],
)
def test_short_sequences_in_bf16_take_the_fp32_kernel_on_a_cpu(
    device: str, precision: str, tokens: int, name: str
) -> None:
    assert choose_backend("auto", Seams(), device, precision, seq_len=tokens).name == name
    assert choose_backend("sdpa", Seams(), device, precision, seq_len=tokens).name == "sdpa"


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_fp32_kernel_is_no_name_for_another_precision(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"model.attention=sdpa_fp32: .* use sdpa with trainer.precision={precision}"):
        choose_backend("sdpa_fp32", Seams(), "cpu", precision)


@pytest.mark.parametrize("words", [(), ("model.window=5",), ("model.n_kv_heads=2",)])
def test_the_fp32_kernel_gives_explicit_attention_under_autocast(words: tuple[str, ...], tiny_run: Any) -> None:
    """Up to what bf16 itself resolves behind it."""
    found = []
    for attention in ("auto", "explicit"):
        run = tiny_run("trainer.precision=bf16", f"model.attention={attention}", "model.init.std=0.3", *words)
        batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0)
        with autocast(run.device, "bf16"):
            run.step.forward(batch, torch.tensor(1 / batch.targets_MT.numel()))[0].objective.backward()
        found.append([p.grad for p in run.model.parameters()])
        assert run.model.backend.name == {"auto": "sdpa_fp32"}.get(attention, attention)
    for ours, reference in zip(*found, strict=True):
        assert (ours - reference).norm() < 1.5e-2 * reference.norm()
