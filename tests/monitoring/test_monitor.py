"""`Monitor`: the files it writes, what it measures, how a run ends, and the two examples."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from stability_lab import Monitor, cli
from stability_lab.compare.comparison import compare
from stability_lab.compare.run_record import find_runs, read_run
from stability_lab.judge.judgement import Judgement, judge
from stability_lab.judge.log import Log
from stability_lab.judge.verdict import Evidence, diverged_at
from stability_lab.logs.training_log import read_logs
from stability_lab.monitoring import record
from stability_lab.tracking.run_files import read_rows

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model: nn.Module, size: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    loss = size * model(torch.ones(1, 3)).square().sum()
    loss.backward()
    return loss


def norm_of(model: nn.Module) -> float:
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(grads).square().sum().sqrt())


def rows_of(monitor: Monitor) -> list[dict[str, Any]]:
    assert monitor.path is not None
    return read_rows(monitor.path / "metrics.jsonl")


def summary_of(monitor: Monitor) -> dict[str, Any]:
    assert monitor.path is not None
    return json.loads((monitor.path / "summary.json").read_text())


def judged(monitor: Monitor) -> Judgement:
    judgement = monitor.finish()
    assert judgement is not None
    return judgement


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_step_is_one_line_with_the_gradient_norm(tmp_path: Path, model: nn.Module) -> None:
    expected = []
    with Monitor(tmp_path / "run", model=model, flush_every=3) as monitor:
        for step in range(1, 8):
            loss = backward(model, size=step)
            monitor.step(loss, lr=0.1 / step, tokens=torch.tensor(10), z_loss=2.5)
            expected.append((loss.item(), norm_of(model)))
    rows = rows_of(monitor)
    assert [row["step"] for row in rows] == [*range(1, 8)]
    assert [row["tokens"] for row in rows] == [*range(10, 80, 10)]
    assert [row["optim/lr"] for row in rows] == [0.1 / step for step in range(1, 8)]
    assert [(row["train/loss"], row["optim/grad_norm"]) for row in rows] == [pytest.approx(e) for e in expected]
    assert all(row["train/ppl"] == math.exp(row["train/loss"]) for row in rows)
    assert {(row["z_loss"], row["optim/skipped"]) for row in rows} == {(2.5, 0.0)}


def test_a_step_reads_nothing_from_the_device(tmp_path: Path, model: nn.Module) -> None:
    reads = []

    def count(name: str) -> Any:
        original = getattr(torch.Tensor, name)
        return lambda *arguments: reads.append(name) or original(*arguments)

    loss = backward(model)
    monitor = Monitor(tmp_path / "run", model=model, flush_every=5)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, count(name))
        for _ in range(4):
            monitor.step(loss, tokens=torch.tensor(3), scale=torch.tensor(2.0), skipped=torch.tensor(False))
        assert reads == []
        monitor.step(loss)
        assert set(reads) == {"tolist"}
    assert len(reads) <= 3  # one for each dtype: float, int and bool


def test_what_the_loop_does_to_its_loss_afterwards_changes_nothing(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run") as monitor:
        loss = torch.tensor(2.0)
        monitor.step(loss)
        loss.zero_()
    assert rows_of(monitor)[0]["train/loss"] == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_of_other_dtypes_is_that_of_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    # In fp16 the norm itself, 600 * 200, would be infinite; in bf16 it would have three digits.
    layer, plain = nn.Linear(300, 200, bias=False, dtype=dtype), nn.Linear(5, 1, bias=False)
    layer.weight.grad = torch.full_like(layer.weight, 601.0)
    plain.weight.grad = torch.full_like(plain.weight, 1000.0)
    both = nn.ModuleList([layer, plain])
    with Monitor(tmp_path / "run", model=both) as monitor:
        monitor.step(1.0)
    assert rows_of(monitor)[0]["optim/grad_norm"] == pytest.approx(
        norm_of(both), rel=2e-3 if dtype.itemsize == 2 else 1e-6
    )


def test_sparse_gradients_and_partly_frozen_models_are_measured(tmp_path: Path) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    frozen = nn.Linear(4, 1).requires_grad_(False)
    frozen(table(torch.tensor([1, 1, 7]))).sum().backward()
    grad = table.weight.grad
    assert grad is not None
    with Monitor(tmp_path / "run", model=nn.ModuleList([table, frozen])) as monitor:
        monitor.step(1.0)
    assert rows_of(monitor)[0]["optim/grad_norm"] == pytest.approx(float(grad.to_dense().norm()))


def test_missing_gradients_are_named(tmp_path: Path, model: nn.Module) -> None:
    monitor = Monitor(tmp_path / "run", model=model)
    with pytest.raises(ValueError, match=r"no parameter has a gradient.*after backward"):
        monitor.step(1.0)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        monitor.step(1.0)
    monitor.step(1.0, grad_norm=2.0)
    monitor.finish()
    assert [row["step"] for row in rows_of(monitor)] == [1]


def test_sharded_models_must_bring_their_norm(tmp_path: Path, model: nn.Module) -> None:
    class FullyShardedDataParallel(nn.Module):
        """Stands for torch's, whose gradients are this rank's share only."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

    backward(model)
    monitor = Monitor(tmp_path / "run", model=FullyShardedDataParallel())
    with pytest.raises(ValueError, match="sharded"):
        monitor.step(1.0)


def test_bad_arguments_are_refused_before_they_are_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="flush_every is 0"):
        Monitor(tmp_path / "run", flush_every=0)
    assert not (tmp_path / "run").exists()
    with Monitor(tmp_path / "run") as monitor:
        with pytest.raises(ValueError, match=r"train/loss has shape \(2,\)"):
            monitor.step(torch.ones(2))
        wrong: dict[str, Any] = {"train/ppl": 1.0}
        with pytest.raises(ValueError, match="train/ppl: the monitor writes this column"):
            monitor.step(1.0, **wrong)
        monitor.step(1.0, step=5)
        with pytest.raises(ValueError, match="step 5 comes after step 5"):
            monitor.step(1.0, step=5)
        monitor.step(1.0)
    assert [row["step"] for row in rows_of(monitor)] == [5, 6]
    with pytest.raises(RuntimeError, match="one Monitor records one run"):
        monitor.step(1.0)
    with pytest.raises(RuntimeError, match="one Monitor records one run"):
        monitor.log_validation(1.0)


def test_run_is_read_like_one_of_ours(tmp_path: Path, model: nn.Module) -> None:
    config = {"seed": 3, "optimizer": {"lr": 0.01}, "depth": 2}
    with Monitor(tmp_path / "a", model=model, config=config, stabilizers=["zloss", "qknorm"]) as monitor:
        monitor.log_validation(3.0)
        for _ in range(4):
            monitor.step(backward(model), lr=0.01)
        monitor.log_validation(torch.tensor(2.0))
    with Monitor(tmp_path / "b", config={"seed": 4, "lr": 0.02}) as other:
        other.step(1.0)
    (first, second), _ = find_runs([tmp_path])
    assert (first.path, first.stabilizers, first.lr) == (monitor.path, "qknorm+zloss", 0.01)
    assert (second.path, second.stabilizers, second.lr) == (other.path, "none", 0.02)
    assert first.config == config
    none, both = compare([first, second]).rows
    assert (none.cell.arm, none.cell.runs[0].seed) == ("none", 4)
    assert both.cell.arm == "qknorm+zloss"
    assert both.metric is not None
    assert both.metric.value == 2.0
    assert (first.metric("val/loss"), first.initial("val/loss"), second.seed) == (2.0, 3.0, 4)


@pytest.mark.slow
def test_summary_has_the_structure_of_a_run_of_ours(
    tmp_path: Path, model: nn.Module, tiny_overrides: tuple[str, ...]
) -> None:
    assert cli.run(["train", *tiny_overrides, f"output_dir={tmp_path / 'ours'}"]) == 0
    ((ours,), _) = find_runs([tmp_path / "ours"])
    with Monitor(tmp_path / "run", model=model) as monitor:
        monitor.log_validation(3.0)
        for _ in range(4):
            monitor.step(backward(model), lr=0.01, tokens=5)
        monitor.log_validation(2.0)
    mine = summary_of(monitor)
    # What only a loop of our own can know.
    assert ours.summary.keys() - mine.keys() <= {"exit_code", "clip_fraction", "tokens_per_s", "perf/peak_memory_bytes"}
    assert mine.keys() <= ours.summary.keys()
    for key in ("scores", "grad_norm"):
        assert mine[key].keys() == ours.summary[key].keys()
    assert mine["final"].keys() <= ours.summary["final"].keys()
    assert (mine["status"], mine["steps"], mine["tokens"]) == ("completed", 4, 20)
    assert (mine["initial"], mine["best"]["step"]) == ({"val/loss": 3.0, "val/ppl": math.exp(3)}, 4)


def test_judgement_is_that_of_the_written_log(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    loss = np.r_[np.linspace(4, 2, 400), np.linspace(2, 3.6, 200)] + 0.01 * generator.standard_normal(600)
    norm = np.exp(0.1 * generator.standard_normal(600))
    norm[[300, 450]] = 40
    with Monitor(tmp_path / "run", flush_every=7, vocab_size=50) as monitor:
        monitor.log_validation(4.0)
        for value, size in zip(loss, norm, strict=True):
            monitor.step(value, grad_norm=size, lr=1e-3, tokens=8)
        monitor.log_validation(3.5)
    assert monitor.path is not None
    log = read_logs(monitor.path)[0].log
    offline = judge(log, Evidence(initial_val_loss=4.0, final_val_loss=3.5, vocab_size=50))
    judgement = judged(monitor)
    assert judgement.verdict == offline.verdict
    assert json.dumps(judgement.as_dict()) == json.dumps(offline.as_dict())
    assert judgement.verdict.verdict == "diverged"
    events = read_rows(monitor.path / "events.jsonl")
    assert events == [json.loads(json.dumps(event.as_dict())) for event in offline.events]
    assert {e["step"] for e in events if e["event"] == "grad_norm_spike"} == {301, 451}


def test_rise_stops_the_run_at_the_flush_that_shows_it(tmp_path: Path) -> None:
    loss = np.r_[np.linspace(4, 2, 200), np.full(100, 3.5)]
    bad = next(
        n for n in range(1, 301) if diverged_at(Log(np.arange(1, n + 1), loss[:n], None), warmup_steps=0) is not None
    )
    with Monitor(tmp_path / "run", flush_every=10) as monitor:
        for value in loss:
            monitor.step(value)
            if monitor.should_stop:
                break
    assert [row["step"] for row in rows_of(monitor)][-1] == math.ceil(bad / 10) * 10
    assert summary_of(monitor)["status"] == "diverged"


def test_nan_is_kept_and_ends_the_run_as_diverged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Monitor(tmp_path / "run", flush_every=4) as monitor:
        for step in range(1, 12):
            monitor.step(torch.tensor(math.nan if step >= 6 else 2.0), lr=1.0)
            assert monitor.should_stop == (step >= 8)
    assert caplog.text.count("the run has diverged (seen at step 8)") == 1
    assert math.isnan(rows_of(monitor)[5]["train/loss"])
    verdict = judged(monitor).verdict
    assert (verdict.verdict, verdict.first_bad_step, verdict.lr_at_first_bad) == ("diverged", 6, 1.0)
    assert summary_of(monitor)["status"] == "diverged"


def test_parameters_that_the_last_update_broke_are_seen(tmp_path: Path, model: nn.Module) -> None:
    with Monitor(tmp_path / "run", model=model) as monitor:
        monitor.step(backward(model))
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] = math.inf
    assert judged(monitor).verdict.verdict == "diverged"


def test_overflow_under_a_grad_scaler_is_a_skip_and_no_divergence(tmp_path: Path, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sizes = []
    with Monitor(tmp_path / "run", model=model, flush_every=2) as monitor:
        for step in range(1, 7):
            model.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            scaler.scale(loss).backward()
            if step == 3:
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = math.inf
            monitor.step(loss, scale=scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            sizes.append(norm_of(model))  # step() has divided the gradients by now
        assert not monitor.should_stop
    rows = rows_of(monitor)
    assert [row["optim/skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert [row["optim/loss_scale"] for row in rows] == [1024, 1024, 1024, 512, 512, 512]
    assert [row["optim/grad_norm"] for row in rows if not row["optim/skipped"]] == pytest.approx(sizes[:2] + sizes[3:])
    judgement, summary = judged(monitor), summary_of(monitor)
    assert judgement.verdict.verdict != "diverged"
    assert (summary["status"], summary["skipped_steps"]) == ("completed", 1)
    assert [event.kind for event in judgement.events if event.step == 3] == ["skipped_step"]


@pytest.mark.parametrize(
    "values",
    [
        {"loss": math.nan, "grad_norm": math.nan, "scale": 8.0},
        {"loss": 1.0, "grad_norm": math.inf, "scale": 1.0},
        {"loss": 1.0, "grad_norm": math.inf},
    ],
)
def test_overflow_with_a_bad_loss_or_without_a_scale_is_no_skip(tmp_path: Path, values: dict[str, Any]) -> None:
    with Monitor(tmp_path / "run") as monitor:
        monitor.step(**values)
    assert summary_of(monitor)["status"] == "diverged"


def test_skips_that_the_loop_knows_are_taken_over(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run") as monitor:
        for norm in (1.0, math.inf, 1.0):
            norm = torch.tensor(norm)
            monitor.step(2.0, grad_norm=norm, skipped=~norm.isfinite())
    assert [row["optim/skipped"] for row in rows_of(monitor)] == [0, 1, 0]
    assert summary_of(monitor)["status"] == "completed"


@pytest.mark.parametrize("flush_every", [1, 2, 50])
def test_validation_stands_in_the_line_of_its_step(tmp_path: Path, flush_every: int) -> None:
    with Monitor(tmp_path / "run", flush_every=flush_every) as monitor:
        monitor.log_validation(5.0)
        for step in range(1, 5):
            monitor.step(4.0)
            if step % 2 == 0:
                monitor.log_validation(4.0 - step if step == 2 else math.nan)
        monitor.log_validation(3.0, step=7)
    rows = rows_of(monitor)
    assert [(row["step"], row.get("val/loss")) for row in rows[:3]] == [(1, None), (2, 2.0), (3, None)]
    assert math.isnan(rows[3]["val/loss"])
    assert rows[4] == {"step": 7, "val/loss": 3.0, "val/ppl": math.exp(3)}
    summary = summary_of(monitor)
    assert summary["initial"]["val/loss"] == 5.0
    assert summary["best"] == {"val/loss": 2.0, "val/ppl": math.exp(2), "step": 2}
    assert summary["final"]["val/loss"] == 3.0


@pytest.mark.parametrize("flush_every", [1, 2, 50])
@pytest.mark.parametrize("numbered", [True, False])
def test_validation_may_come_before_its_step(tmp_path: Path, flush_every: int, numbered: bool) -> None:
    with Monitor(tmp_path / "run", flush_every=flush_every) as monitor:
        for step in range(1, 6):
            if step in (2, 3):
                monitor.log_validation(10.0 - step, step=step)
            monitor.step(float(step), grad_norm=1.0, step=step if numbered else None)
    rows = rows_of(monitor)
    assert [(row["step"], row["train/loss"], row.get("val/loss")) for row in rows] == [
        (1, 1.0, None),
        (2, 2.0, 8.0),
        (3, 3.0, 7.0),
        (4, 4.0, None),
        (5, 5.0, None),
    ]
    assert judged(monitor).steps["loss"].tolist() == [1, 2, 3, 4, 5]


def test_validation_that_comes_late_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Monitor(tmp_path / "run", flush_every=4) as monitor:
        for step in range(1, 7):
            monitor.step(float(step))
        monitor.log_validation(3.0)
        monitor.log_validation(2.0, step=5)  # waits in memory
        assert caplog.text == ""
        monitor.log_validation(1.0, step=2)  # is on the disk
    assert "step 2 is written already" in caplog.text
    assert [row.get("val/loss") for row in rows_of(monitor)] == [None, None, None, None, 2.0, 3.0]
    summary = summary_of(monitor)
    assert summary["final"]["val/loss"] == 3.0
    assert (summary["best"]["val/loss"], summary["best"]["step"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": None}, "loss is None"),
        ({"loss": "x"}, "train/loss is 'x', but must be one number"),
        ({"loss": 1.0, "tokens": math.nan}, "tokens is nan"),
        ({"loss": 1.0, "tokens": -1}, "tokens is -1"),
        ({"loss": 1.0, "step": 1.5}, "step is 1.5, but must be a whole number from 1 on"),
        ({"loss": 1.0, "step": 2**70}, "step is 1180591620717411303424"),
        ({"loss": 1.0, "step": 0}, "step is 0, but must be a whole number from 1 on"),
        ({"loss": 1.0, "lr": [1.0, 2.0]}, r"optim/lr is \[1.0, 2.0\], but must be one number"),
    ],
)
def test_what_is_no_number_is_refused_at_the_call(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with Monitor(tmp_path / "run") as monitor:
        monitor.step(2.0)
        with pytest.raises(ValueError, match=words):
            monitor.step(**values)
        monitor.step(3.0)
    assert [(row["step"], row["train/loss"]) for row in rows_of(monitor)] == [(1, 2.0), (2, 3.0)]


def test_what_tensors_hold_costs_no_row(tmp_path: Path) -> None:
    nothing: Any = None
    with Monitor(tmp_path / "run") as monitor:
        monitor.step(2.0, grad_norm=1.0, tokens=torch.tensor(8), skipped=nothing)
        monitor.step(2.0, grad_norm=torch.tensor(1.0), scale=torch.tensor(0.0), tokens=torch.tensor(math.nan))
        monitor.step(2.0, grad_norm=1.0, scale=0.0)
        monitor.step(1e308, grad_norm=1e308)
        monitor.step(1e308, grad_norm=1.0)
    rows = rows_of(monitor)
    assert [row.get("tokens") for row in rows] == [8, 8, None, None, None]
    assert [math.isnan(row["optim/grad_norm"]) for row in rows] == [False, True, True, False, False]
    assert judged(monitor).verdict.verdict == "undecided"


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 0},
        {"vocab_size": 2.5},
        {"unigram_entropy": math.nan},
        {"unigram_entropy": -1.0},
        {"warmup_steps": -1},
        {"warmup_steps": None},
        {"config": 3},
    ],
)
def test_bad_facts_are_refused_before_there_is_a_folder(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))} is"):
        Monitor(tmp_path / "run", **values)
    assert not (tmp_path / "run").exists()


def test_a_namespace_is_a_config_and_its_credentials_stay_out(tmp_path: Path) -> None:
    given = argparse.Namespace(seed=5, lr=0.1, api_key="SECRET", pad_token="<|bos|>", hub={"password": "x y"})
    monitor = Monitor(tmp_path / "run", config=given)
    monitor.finish()
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert kept == {
        "seed": 5,
        "api_key": "[redacted]",
        "pad_token": "<|bos|>",
        "hub": {"password": "[redacted]"},
        "optimizer": {"lr": 0.1},
    }


@pytest.mark.parametrize("config", [{"lr": 0}, {"learning_rate": 0}, {"optimizer": {"lr": 0}, "lr": 0}])
def test_runs_of_an_own_loop_are_compared_over_one_learning_rate(
    tmp_path: Path, config: dict[str, Any], run_command: Any
) -> None:
    for i, (arm, lr, seed) in enumerate(itertools.product(("none", "qknorm"), (0.1, 0.3, 1.0), (0, 1))):
        given = {"seed": seed} | {key: {"lr": lr} if key == "optimizer" else lr for key in config}
        with Monitor(tmp_path / "all" / str(i), config=given, stabilizers=[arm] if arm != "none" else ()) as monitor:
            for step in range(120):
                monitor.step(4 - step / 100 + lr * (arm == "none") + seed / 100, grad_norm=1.0, lr=lr)
            monitor.log_validation(3.0 + lr * (arm == "none") + seed / 100)
    shown = run_command("compare", str(tmp_path / "all"))
    assert shown.code == 0
    assert "Learning rates" in shown.out
    assert shown.out.startswith("12 runs, 2 of stabilizer at each lr;")


def test_strange_initial_loss_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path / "run", vocab_size=256)
    monitor.log_validation(math.log(256))
    assert caplog.records == []
    monitor = Monitor(tmp_path / "other", vocab_size=256)
    monitor.log_validation(25.0)
    assert "25" in caplog.text


def offline_block(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `score` says of the folder of a run."""
    capsys.readouterr()
    assert cli.run(["score", str(monitor.path), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


@pytest.mark.parametrize("bad", [None, 150])
@pytest.mark.parametrize("without", [{1}, {1, 2, 3, 150}, set(range(1, 200, 3)), set(range(1, 201)), set()])
def test_steps_without_a_gradient_norm_are_judged_alike_online_and_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without: set[int], bad: int | None
) -> None:
    generator = np.random.default_rng(0)
    with Monitor(tmp_path / "run", flush_every=10) as monitor:
        for step in range(1, 201):
            loss, norm = 2 + 0.05 * generator.standard_normal(2)
            norm = math.nan if bad is not None and step >= bad else norm * (8 if step == 100 else 1)
            monitor.step(loss, grad_norm=None if step in without else norm)
    judgement = judged(monitor)
    diverged = bad is not None and not without >= set(range(bad, 201))
    assert monitor.should_stop == diverged
    assert (judgement.verdict.verdict == "diverged") == diverged
    first = next((step for step in range(bad or 201, 201) if step not in without), None)
    assert judgement.verdict.first_bad_step == (first if diverged else None)
    assert ("grad_norm" in judgement.scores) == (len(without) < 200)
    assert [e.kind for e in judgement.events if e.step == 100] == ["grad_norm_spike"] * (100 not in without)
    expected = json.loads(json.dumps(judgement.as_dict()))
    block = offline_block(monitor, capsys)
    assert str({key: block[key] for key in expected if key != "notes"}) == str(
        {key: value for key, value in expected.items() if key != "notes"}
    )
    assert set(expected["notes"]) <= set(block["notes"])


def test_attention_logits_of_the_user_are_judged(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run") as monitor:
        for step in range(1, 6):
            measured: dict[str, Any] = {"attn/max_logit": 10.0 ** (step - 1)} if step % 2 else {}
            monitor.step(2.0, **measured)
    assert summary_of(monitor)["max_attn_logit"] == 1e4
    assert "attention_logit_alert" in {event.kind for event in judged(monitor).events}


def test_existing_folder_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Monitor(tmp_path / "run")
    first.finish()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert caplog.text == ""
    second = Monitor(tmp_path / "run")
    second.step(1.0)
    second.finish()
    assert second.path == tmp_path / "run-2"
    assert f"{tmp_path / 'run'} exists, so this run is written to {tmp_path / 'run-2'}" in caplog.text
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("error", "status", "ended_by"),
    [
        (ZeroDivisionError("by zero\nsecond line"), "failed", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (SystemExit(3), "interrupted", "SystemExit"),
    ],
)
def test_exception_in_the_loop_leaves_its_steps_on_disk(
    tmp_path: Path, error: BaseException, status: str, ended_by: str
) -> None:
    monitor = Monitor(tmp_path / "run")

    def loop() -> None:
        with monitor:
            for _ in range(3):
                monitor.step(torch.tensor(2.0))
            raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert len(rows_of(monitor)) == 3
    assert (summary_of(monitor)["status"], summary_of(monitor)["ended_by"]) == (status, ended_by)


def test_a_device_that_fails_costs_only_its_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("CUDA error")

    monitor = Monitor(tmp_path / "run", flush_every=3)

    def loop() -> None:
        with monitor:
            for step in range(1, 5):
                monitor.step(float(step))
            monkeypatch.setattr(record, "_to_host", broken)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        loop()
    assert [row["step"] for row in rows_of(monitor)] == [1, 2, 3]
    assert summary_of(monitor)["status"] == "failed"
    assert "the last steps could not be read" in caplog.text


def test_full_disk_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with Monitor(tmp_path / "run", flush_every=2) as monitor:
        with monkeypatch.context() as patch:
            patch.setattr("stability_lab.tracking.run_files.os.write", full)
            for _ in range(4):
                monitor.step(2.0)
        assert "No space left on device" in caplog.text
        assert rows_of(monitor) == []
        monitor.step(2.0)
    assert [row["step"] for row in rows_of(monitor)] == [1, 2, 3, 4, 5]


def test_a_run_that_is_abandoned_is_closed(tmp_path: Path, model: nn.Module) -> None:
    monitor = Monitor(tmp_path / "run", model=model, flush_every=3)
    path = monitor.path
    assert path is not None
    for _ in range(5):
        monitor.step(backward(model))
    assert len(read_rows(path / "metrics.jsonl")) == 2  # what a killed process would leave
    assert json.loads((path / "summary.json").read_text()) == {"status": "running"}
    assert read_run(path).stabilizers == "none"
    del monitor
    gc.collect()
    assert len(read_rows(path / "metrics.jsonl")) == 5
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["status"], summary["ended_by"]) == ("interrupted", "the program never called finish()")


def test_a_run_without_steps_has_no_verdict(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run") as monitor:
        monitor.log_validation(4.0)
    assert monitor.finish() is None
    summary = summary_of(monitor)
    assert (summary["status"], summary["verdict"], summary["steps"]) == ("completed", None, 0)
    assert rows_of(monitor) == []


@pytest.mark.parametrize(
    ("config", "lr"),
    [
        ({"optimizer": {"lr": 0.5}, "lr": 0.1}, 0.5),
        ({"optimizer": "adamw", "lr": 0.1}, 0.1),
        ({"learning_rate": np.float64(0.1)}, 0.1),
        ({}, 0.3),
    ],
)
def test_learning_rate_comes_from_the_config_or_the_log(tmp_path: Path, config: dict[str, Any], lr: float) -> None:
    with Monitor(tmp_path / "run", config=config, flush_every=1) as monitor:
        for value in (0.2, 0.3, 0.1):
            monitor.step(1.0, lr=value)
    assert read_run(tmp_path / "run").lr == lr


def test_config_may_hold_anything_but_secrets(tmp_path: Path) -> None:
    config = {
        "dtype": torch.float16,
        "steps": np.int64(3),
        "flags": (True, None),
        "data": {Path("a"): Path("b")},
        "wandb_api_key": "0123456789abcdef0123456789abcdef01234567",
    }
    Monitor(tmp_path / "run", config=config).finish()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "0123456789abcdef" not in text
    read = yaml.safe_load(text)
    del read["wandb_api_key"]
    assert math.isnan(read.pop("optimizer")["lr"])
    assert read == {"seed": None, "dtype": "torch.float16", "steps": 3, "flags": [True, None], "data": {"a": "b"}}
    with pytest.raises(ValueError, match="the learning rate is 'fast'"):
        Monitor(tmp_path / "other", config={"lr": "fast"})
    assert not (tmp_path / "other").exists()


def test_only_rank_0_writes_and_all_ranks_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Monitor(tmp_path / "run", flush_every=2) as monitor:
        monitor.step(2.0)
        monitor.step(math.nan)
        assert monitor.should_stop
    assert monitor.path is None
    assert judged(monitor).verdict.verdict == "diverged"
    assert not (tmp_path / "run").exists()
    # The process group knows better than the environment.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert Monitor(tmp_path / "run").path == tmp_path / "run"


ALONE = """
import json, sys
import stability_lab
early = [name for name in ("torch", "numpy") if name in sys.modules]
from stability_lab import Monitor
with Monitor(sys.argv[1]) as monitor:
    monitor.step(2.0)
late = [name for name in ("hydra", "omegaconf", "wandb", "transformers", "matplotlib") if name in sys.modules]
print(json.dumps([early, late]))
"""


@pytest.mark.slow
def test_needs_neither_hydra_nor_wandb_and_is_imported_lazily(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]
    assert done.stderr == ""
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 1


def test_package_has_no_other_lazy_names() -> None:
    import stability_lab

    with pytest.raises(AttributeError, match="'stability_lab' has no attribute 'Moniter'"):
        _ = stability_lab.Moniter


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.inner(inputs) - targets).square().mean()


def test_the_lines_in_the_document_run(tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES.parent / "docs" / "monitor.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "torch": torch,
        "model": WithLoss(model),
        "batches": [(torch.ones(2, 3), torch.zeros(2, 2))] * 5,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
    }
    exec(code, names)
    assert len(read_rows(tmp_path / "runs" / "mine" / "metrics.jsonl")) == 5


def test_plain_loop_example(tmp_path: Path) -> None:
    path, judgement = example("nanogpt_loop").train(60, 3e-3, tmp_path / "run")
    rows, summary = read_rows(path / "metrics.jsonl"), json.loads((path / "summary.json").read_text())
    assert [row["step"] for row in rows] == [*range(1, 61)]
    assert summary["status"] == "completed"
    assert summary["final"]["val/loss"] < summary["initial"]["val/loss"] - 0.5
    assert rows[-1]["val/loss"] == summary["final"]["val/loss"]
    assert judgement.verdict.verdict == summary["verdict"] != "diverged"
    assert "(m)" in (EXAMPLES / "nanogpt_loop.py").read_text()


def trainer_control() -> Any:
    return SimpleNamespace(should_training_stop=False)


def trainer_arguments(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"logging_steps": 1, "logging_strategy": "steps", "logging_nan_inf_filter": False, **changes}
    )


def state(step: int, tokens: int = 0) -> Any:
    return SimpleNamespace(global_step=step, num_input_tokens_seen=tokens, is_world_process_zero=True)


def test_trainer_callback_records_what_the_trainer_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(tmp_path / "run", flush_every=1)
    callback, control, arguments = monitor.callback(), trainer_control(), trainer_arguments()
    callback.on_train_begin(arguments, state(0), control)
    assert caplog.text == ""
    for step in (1, 2):
        logs = {"loss": 3.0 - step, "grad_norm": 0.5, "learning_rate": 0.1, "epoch": 0.1}
        callback.on_log(arguments, state(step, tokens=64 * step), control, logs=logs)
    callback.on_log(arguments, state(2), control, logs={"eval_loss": 1.5, "eval_runtime": 1.0})
    overflow = {"loss": 1.0, "grad_norm": math.inf, "learning_rate": 0.1}
    callback.on_log(arguments, state(3, 192), control, logs=overflow, optimizer=SimpleNamespace(step_was_skipped=True))
    assert not control.should_training_stop
    callback.on_log(arguments, state(4, 256), control, logs={"loss": math.nan, "learning_rate": 0.1})
    callback.on_log(arguments, state(4), control, logs={"train_runtime": 1.0, "train_loss": 1.5})
    assert control.should_training_stop
    monitor.finish()
    rows = rows_of(monitor)
    assert [(row["step"], row["tokens"], row["optim/skipped"]) for row in rows] == [
        (1, 64, 0),
        (2, 128, 0),
        (3, 192, 1),
        (4, 256, 0),
    ]
    assert (rows[1]["val/loss"], rows[1]["optim/grad_norm"], rows[1]["optim/lr"]) == (1.5, 0.5, 0.1)
    assert summary_of(monitor)["status"] == "diverged"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logging_steps": 10}, "logs every 10 steps"),
        ({"logging_strategy": "epoch"}, "logs every epoch"),
        ({"logging_nan_inf_filter": True}, "logging_nan_inf_filter=False"),
    ],
)
def test_trainer_callback_says_what_the_log_cannot_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str
) -> None:
    callback = Monitor(tmp_path / "run").callback()
    callback.on_train_begin(trainer_arguments(**changes), state(0), trainer_control())
    assert said in caplog.text


def test_trainer_callback_can_leave_the_training_alone(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "run", flush_every=1)
    control = trainer_control()
    callback = monitor.callback(stop_on_divergence=False)
    callback.on_log(trainer_arguments(), state(1), control, logs={"loss": math.nan})
    assert monitor.should_stop
    assert not control.should_training_stop


@pytest.mark.slow
def test_trainer_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("accelerate")
    caplog.set_level(logging.WARNING, logger="stability_lab")
    path, judgement = example("trainer_callback").train(20, 3e-3, tmp_path / "run")
    rows, summary = read_rows(path / "metrics.jsonl"), json.loads((path / "summary.json").read_text())
    assert [row["step"] for row in rows] == [*range(1, 21)]
    assert all(math.isfinite(row["train/loss"]) and row["optim/grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in rows if "val/loss" in row] == [10, 20]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3
    assert judgement.verdict.verdict == summary["verdict"] != "diverged"
    assert [r for r in caplog.records if r.name == "stability_lab"] == []
