"""The loop: one row a step whatever the flush, measurements that touch nothing, and the end of a diverging run."""

import copy
import math
import os
import signal

import pytest
import torch

from stability_lab.config import ConfigError
from stability_lab.diagnostics.probe import probe_attention, validate
from stability_lab.judge import watch
from stability_lab.judge.series import Row, perplexity
from stability_lab.judge.verdict import Evidence
from stability_lab.judge.watch import Watch
from stability_lab.training.checkpoint import load_weights, save_weights
from stability_lab.training.inject import Fault, InjectedFault, Injector, parse

# The largest power of ten that keeps the weights of the first step finite: Adam divides it by 1 - beta1.
DIVERGING = ("optimizer.lr=1e37", "schedule.warmup_steps=0", "schedule.name=constant", "trainer.max_steps=7")


@pytest.fixture(scope="module")
def plain(trained):
    return trained("trainer.max_steps=7", "trainer.log_every=1")


def test_one_row_a_step(plain):
    assert [row["step"] for row in plain.sink.seen] == list(range(1, 8))
    assert [row["tokens"] for row in plain.sink.seen] == [4 * 16 * step for step in range(1, 8)]
    for row in plain.sink.seen:
        assert row["train/ppl"] == math.exp(row["train/loss"])
        assert row["optim/lr"] == plain.run.schedule.lr(row["step"])
        assert "bad" not in row
    assert plain.loop.stopped_by is None
    assert plain.sink.events == []


def test_training_lowers_the_loss(plain):
    assert plain.sink.seen[-1]["train/loss"] < plain.sink.seen[0]["train/loss"] - 0.3
    assert plain.loop.watch.newest["val/loss"] < plain.loop.watch.initial["val/loss"] - 0.3


@pytest.mark.parametrize("log_every", [3, 10])
def test_flushes_do_not_change_rows(plain, trained, log_every):
    other = trained("trainer.max_steps=7", f"trainer.log_every={log_every}")
    assert other.sink.deliveries == ([3, 3, 1] if log_every == 3 else [7])
    assert other.steps == plain.steps
    for a, b in zip(plain.run.step.update.parameters, other.run.step.update.parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("key", ["trainer.eval_every", "diagnostics.probe_every"])
def test_measuring_does_not_touch_training(trained, key):
    often = trained("model.dropout=0.1", f"{key}=1")
    never = trained("model.dropout=0.1", f"{key}=null")
    name = "val/loss" if "eval" in key else "attn/max_logit"
    assert [row["step"] for row in often.sink.seen if name in row] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in never.sink.seen if name in row] == [5]
    assert often.steps == never.steps
    assert name in never.loop.watch.initial


def test_dropout_is_on_in_training_only(trained, plain):
    dropped = trained("model.dropout=0.1", "trainer.max_steps=7", "trainer.log_every=1")
    assert dropped.loop.watch.initial == plain.loop.watch.initial
    assert dropped.steps[0]["train/loss"] != plain.steps[0]["train/loss"]
    assert dropped.run.model.training


@pytest.mark.parametrize("log_every", [1, 3, 10])
def test_diverging_run_stops_at_its_first_bad_step(trained, log_every, tmp_path):
    result = trained(*DIVERGING, f"trainer.log_every={log_every}")
    assert result.loop.stopped_by == "nonfinite"
    assert [row["step"] for row in result.sink.seen] == [1, 2]
    assert math.isfinite(result.sink.seen[0]["train/loss"])
    assert not math.isfinite(result.sink.seen[1]["train/loss"])
    assert result.loop.watch.n == 2
    last = result.sink.events[-1]
    assert (last["event"], last["step"]) == ("nonfinite_step", 2)
    assert all(p.isfinite().all() for p in result.run.step.update.parameters)
    assert save_weights(result.run.model, tmp_path / "last")
    # The weights are those after the last good step.
    other = trained(*DIVERGING[:-1], "trainer.max_steps=1")
    load_weights(result.run.model, tmp_path / "last", torch.device("cpu"))
    for a, b in zip(result.run.step.update.parameters, other.run.step.update.parameters, strict=True):
        assert torch.equal(a, b)


def test_update_that_overflows_is_found_one_step_later_and_not_saved(trained, tmp_path):
    result = trained("optimizer.lr=1e38", "schedule.warmup_steps=0", "trainer.max_steps=7")
    assert result.loop.stopped_by == "nonfinite"
    assert [row["step"] for row in result.sink.seen] == [1, 2]
    assert not save_weights(result.run.model, tmp_path / "last")
    assert not list(tmp_path.iterdir())


def test_summary_of_a_diverged_run(trained):
    _, summary = trained(*DIVERGING).loop.judge()
    assert summary["verdict"] == "diverged"
    assert summary["first_bad_step"] == 2
    assert summary["steps"] == 2
    assert "val/loss" not in summary["final"]
    assert summary["scores"]["loss"]["olmo_core"]["score"] is None
    assert summary["scores"]["loss"]["olmo_core"]["reason"]


def test_summary_of_a_sound_run(plain, monkeypatch):
    monkeypatch.setattr(plain.loop.watch, "evidence", Evidence(vocab_size=257, warmup_steps=2))
    _, summary = plain.loop.judge()
    losses = [row["train/loss"] for row in plain.sink.seen]
    assert summary["verdict"] == "undecided"  # seven steps
    assert summary["first_bad_step"] is None
    assert summary["final"]["train/loss"] == pytest.approx(sum(losses) / 7)
    assert summary["final"]["val/loss"] == plain.sink.seen[-1]["val/loss"]
    assert summary["best"]["step"] == 7
    assert summary["best"]["val/loss"] == summary["final"]["val/loss"]
    assert summary["skipped_steps"] == 0
    assert summary["clip_fraction"] == sum(row["optim/clip_coef"] < 1 for row in plain.sink.seen) / 7
    norms = sorted(row["optim/grad_norm"] for row in plain.sink.seen)
    assert summary["grad_norm"]["p50"] == pytest.approx(norms[3])


def rows(loss: list[float | None], grad_norm: list[float], skipped: list[float]) -> list[Row]:
    return [
        {"step": i + 1, "tokens": 10 * (i + 1), "train/loss": a, "optim/grad_norm": g, "optim/skipped": s}
        | {"optim/clip_coef": 1.0, "optim/lr": 1e-3}
        for i, (a, g, s) in enumerate(zip(loss, grad_norm, skipped, strict=True))
    ]


def test_skipped_steps_are_counted_and_not_judged():
    watched = Watch(Evidence(vocab_size=257))
    watched.add(rows([5.0, 4.0, None, 3.0], [1.0, math.inf, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]))
    _, summary = watched.judge()
    assert summary["skipped_steps"] == 2
    assert summary["first_bad_step"] is None
    assert summary["verdict"] != "diverged"
    assert summary["grad_norm"]["p99"] == 1.0
    assert summary["final"]["train/loss"] == 4.0


def test_summary_of_a_run_without_a_step():
    judgement, summary = Watch(Evidence()).judge()
    assert judgement is None
    assert summary["verdict"] is None
    assert summary["steps"] == 0
    assert summary["max_attn_logit"] is None


SHORT = ("trainer.max_steps=6", "trainer.log_every=2")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nan_grad@3", "nan_loss@3", "inf_loss@3"])
def test_a_bad_step_stops_the_run_and_changes_nothing(trained, fault):
    result = trained(*SHORT, f"debug.inject={fault}")
    before = trained("trainer.max_steps=2", "schedule=constant", "schedule.warmup_steps=0")
    same = trained(*SHORT, f"debug.inject={fault}", "schedule=constant", "schedule.warmup_steps=0")
    assert result.loop.stopped_by == "nonfinite"
    assert result.sink.seen[-1]["step"] == 3
    assert [event["event"] for event in result.sink.events] == ["nonfinite_step"]
    for a, b in zip(same.run.step.update.parameters, before.run.step.update.parameters, strict=True):
        assert torch.equal(a, b)


def test_a_bad_step_is_skipped_and_the_run_goes_on(trained):
    result = trained(*SHORT, "debug.inject=nan_loss@3", "stability.on_nonfinite=skip")
    assert result.loop.stopped_by is None
    assert [row["step"] for row in result.sink.seen] == [1, 2, 3, 4, 5, 6]
    assert [row["optim/skipped"] for row in result.sink.seen] == [0, 0, 1, 0, 0, 0]
    assert all(p.isfinite().all() for p in result.run.step.update.parameters)
    _, summary = result.loop.judge()
    assert summary["verdict"] != "diverged"
    assert summary["skipped_steps"] == 1


def test_a_bad_step_is_warned_of_and_the_run_goes_on(trained):
    result = trained(*SHORT, "debug.inject=nan_loss@3", "stability.on_nonfinite=warn")
    assert result.loop.stopped_by is None
    assert len(result.sink.seen) == 6
    assert math.isfinite(result.sink.seen[-1]["train/loss"])
    _, summary = result.loop.judge()
    assert summary["verdict"] == "undecided"  # six steps, and the loss is finite again
    assert summary["events"] == {"nonfinite_step": 1}


def test_a_batch_without_a_valid_token_has_no_loss_and_changes_nothing(trained):
    result = trained(*SHORT, "debug.inject=all_ignored@3")
    row = result.sink.seen[2]
    assert row["train/loss"] is None
    assert row["optim/skipped"] == 1
    assert row["optim/grad_norm"] == 0
    assert math.isfinite(result.sink.seen[3]["train/loss"])
    assert [event["event"] for event in result.sink.events] == ["skipped_step"]


def test_the_learning_rate_and_the_batch_are_changed_at_their_step_only(trained, plain):
    spiked = trained(*SHORT, "debug.inject=lr_spike@3x30")
    clean = trained(*SHORT)
    factors = [a["optim/lr"] / b["optim/lr"] for a, b in zip(spiked.sink.seen, clean.sink.seen, strict=True)]
    assert factors == pytest.approx([1, 1, 30, 1, 1, 1])
    bad = trained(*SHORT, "debug.inject=bad_batch@3")
    assert bad.steps[:2] == clean.steps[:2]
    assert bad.steps[2]["train/loss"] != clean.steps[2]["train/loss"]


def test_after_a_shift_of_data_every_sequence_is_read_backwards():
    inject = Injector(parse("data_shift@3", 6))
    windows = torch.arange(10).view(2, 5)
    assert torch.equal(inject.tokens(2, windows), windows)
    assert all(torch.equal(inject.tokens(step, windows), windows.flip(1)) for step in (3, 4, 6))


def test_an_injected_exception_ends_the_run_at_its_step(prepare):
    result = prepare(*SHORT, "debug.inject=raise@3")
    with pytest.raises(InjectedFault, match="raise@3"):
        result.loop.train()
    assert [row["step"] for row in result.sink.seen] == [1, 2]


def test_an_injected_kill_is_sent_before_its_step(prepare, monkeypatch):
    sent = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        raise InjectedFault("a real SIGKILL would not return")

    monkeypatch.setattr(os, "kill", kill)
    result = prepare(*SHORT, "debug.inject=kill@3")
    with pytest.raises(InjectedFault):
        result.loop.train()
    assert sent == [(os.getpid(), signal.SIGKILL)]
    assert [row["step"] for row in result.sink.seen] == [1, 2]


@pytest.mark.parametrize("text", ["nan@3", "nan_grad", "nan_grad@0", "lr_spike@3", "nan_grad@3x2", "lr_spike@3x1e"])
def test_a_fault_that_does_not_exist_is_refused(text):
    with pytest.raises(ConfigError, match=r"debug\.inject="):
        parse(text, max_steps=40)
    assert parse(["nan_grad@40", "lr_spike@3x2.5"], max_steps=40) == (Fault("nan_grad", 40), Fault("lr_spike", 3, 2.5))


def test_a_finite_divergence_stops_the_run_and_is_evaluated(prepare, monkeypatch):
    """The rule itself is the judge's; here it says yes from step 4 on."""
    monkeypatch.setattr(watch, "diverged_at", lambda log, warmup: 4 if len(log) >= 4 else None)
    result = prepare(*SHORT)
    result.loop.train()
    assert result.loop.stopped_by == "divergence"
    assert [row["step"] for row in result.sink.seen] == [1, 2, 3, 4]
    assert "val/loss" in result.sink.seen[-1]
    assert "attn/max_logit" in result.sink.seen[-1]


def test_flush_delivers_what_is_pending(prepare):
    half = prepare("trainer.log_every=10")
    for step in (1, 2):
        half.loop._take(step)
    assert half.sink.seen == []
    half.loop.flush()
    assert [row["step"] for row in half.sink.seen] == [1, 2]
    half.loop.flush()
    assert len(half.sink.seen) == 2


def test_validation_does_not_depend_on_the_batch_size(plain):
    results = [
        validate(plain.run.model, plain.run.objective, plain.run.eval_windows, size, 100) for size in (1, 3, 8, 100)
    ]
    for result in results[1:]:
        assert result["val/loss"] == pytest.approx(results[0]["val/loss"], rel=1e-6)
        assert result["val/ppl"] == pytest.approx(results[0]["val/ppl"], rel=1e-6)


@pytest.mark.oracle
def test_validation_is_the_mean_cross_entropy_over_all_windows(plain):
    windows = plain.run.eval_windows
    with torch.no_grad():
        logits = plain.run.model(windows[:, :-1]).logits_BTV
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), windows[:, 1:].flatten()).item()
    result = validate(plain.run.model, plain.run.objective, windows, 4, n_bytes=100)
    assert result["val/loss"] == pytest.approx(expected, rel=1e-6)
    assert result["val/ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
    assert result["val/bits_per_byte"] == pytest.approx(expected * 8 * 16 / math.log(2) / 100, rel=1e-6)


def test_perplexity_overflows_to_infinity():
    assert perplexity(800.0) == math.inf
    assert perplexity(0.0) == 1.0
    assert math.isnan(perplexity(math.nan))


def test_probe_reports_every_layer_and_no_nan_is_hidden(plain):
    measured = probe_attention(plain.run.model, plain.run.objective, plain.run.probe_windows)
    layers = [measured[f"attn/max_logit/L{i:02d}"] for i in range(2)]
    assert measured["attn/max_logit"] == max(layers)
    assert measured["attn/max_abs_logit"] >= abs(measured["attn/max_logit"])
    assert 0 < measured["attn/entropy"] <= 1
    broken = copy.deepcopy(plain.run.model)
    with torch.no_grad():
        broken.blocks[1].attn.wq.weight[0] = math.nan
    assert math.isnan(probe_attention(broken, plain.run.objective, plain.run.probe_windows)["attn/max_logit"])
