"""Logs as users have them after a crash, from file to verdict: each a kind, with variants of it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab import cli
from stability_lab.config import ConfigError
from stability_lab.logs.training_log import NamedLog, read_logs

Row = dict[str, Any]


def falling(n: int, seed: int = 0, begin: float = 7.0, end: float = 3.0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.02, n)
    return [round(float(x), 6) for x in end + (begin - end) * np.exp(-6 * np.arange(n) / n) + noise]


def jsonl(folder: Path, rows: Sequence[Row], name: str = "log.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / name


def table(folder: Path, rows: Sequence[Row], name: str = "log.csv") -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def losses(log: NamedLog) -> list[float]:
    assert log.log.loss is not None
    return log.log.loss.tolist()


def blocks(capsys: pytest.CaptureFixture[str], *files: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.run(["score", *map(str, files), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


# Rows of validation that have a learning rate, or a counter of their own.


@pytest.mark.parametrize("at", [0, 15, 30])
@pytest.mark.parametrize(
    "validation",
    [
        {"iter": 8, "lr": 0.1},
        {"iter": 8, "lr": 0.1, "mIoU": 0.5, "mode": "val"},
        {"iter": 250, "tokens": 4096, "acc": 0.7},
        {"epoch": 1, "iter": 0, "val/loss": 9.0, "max_attn_logit": 3.0},
    ],
)
def test_rows_of_validation_throw_no_training_away(validation: Row, at: int, tmp_path: Path) -> None:
    true = falling(30)
    rows: list[Row] = [{"iter": 10 + 10 * i, "loss": loss, "lr": 0.1} for i, loss in enumerate(true)]
    (log,) = read_logs(jsonl(tmp_path, [*rows[:at], *[validation] * 3, *rows[at:]]))
    assert losses(log) == true
    assert log.log.step.tolist() == list(range(10, 301, 10))


def test_a_counter_within_epochs_with_rows_of_validation(tmp_path: Path) -> None:
    true = falling(25 * 69)
    rows: list[Row] = []
    for i, loss in enumerate(true):
        rows.append({"mode": "train", "epoch": 1 + i // 69, "iter": 1 + i % 69, "lr": 0.1, "loss": loss})
        if i % 345 == 344:
            rows.append({"mode": "val", "epoch": 1 + i // 69, "iter": 12, "lr": 0.1, "AP": 0.6})
    (log,) = read_logs(jsonl(tmp_path, rows))
    assert losses(log) == true
    assert log.log.step.tolist() == list(range(1, 25 * 69 + 1))


# Several runs in one table.


@pytest.mark.parametrize("column", ["model", "lr_name", "seed", "Experiment"])
@pytest.mark.parametrize("layout", ["stacked", "interleaved", "blocks of ten"])
@pytest.mark.parametrize("dies", [0, 2])
def test_runs_of_one_table_are_judged_one_by_one(
    column: str, layout: str, dies: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that dies is told, whichever it is."""
    names: list[Any] = [1, 2, 3] if column == "seed" else ["a", "b", "c"]
    runs = {}
    for seed, name in enumerate(names):
        values: list[Any] = falling(200, seed)
        if seed == dies:
            values[150:] = ["nan"] * 50
        runs[name] = [{column: name, "step": i, "train_loss": value} for i, value in enumerate(values)]
    rows = [row for run in runs.values() for row in run]
    if layout == "interleaved":
        rows.sort(key=lambda row: row["step"])
    elif layout == "blocks of ten":
        rows.sort(key=lambda row: row["step"] // 10)
    found = blocks(capsys, table(tmp_path, rows))
    assert [block["run"] for block in found] == [str(name) for name in names]
    assert [block["verdict"] for block in found] == ["diverged" if seed == dies else "stable" for seed in range(3)]
    assert [block["steps"]["values"] for block in found] == [200] * 3


# Training and validation under one name.


@pytest.mark.parametrize(("column", "training", "other"), [("split", "train", "val"), ("Phase", "TRAIN", "Test")])
@pytest.mark.parametrize("step", ["same step", "counter of its own", "every row"])
def test_losses_of_validation_are_no_spikes(
    column: str, training: str, other: str, step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = []
    for i, loss in enumerate(falling(60)):
        rows.append({column: training, "step": i, "loss": loss})
        if step == "every row" or i % 20 == 19:
            rows.append({column: other, "step": i // 20 if step == "counter of its own" else i, "loss": 6.0})
    (block,) = blocks(capsys, jsonl(tmp_path, rows))
    assert (block["verdict"], block["steps"]["values"], block["events"]) == ("stable", 60, [])
    assert block["left_out_many"]
    assert sum(block["left_out"].values()) == len(rows) - 60


# Printed logs are in test_printed.py; here is what they are for: the end of a run that died.


@pytest.mark.parametrize(
    "line",
    [
        "iter {i}: loss {x}, time 1.00ms, mfu 1.00%",
        "s:{i} trl:{x} lr:0.000300 norm:1.0",
        "step    {i}/500 | loss {x} (+0.1z)| norm 1.0 (+0.1z)| lr 3.00e-04 | 10.0 ms | 40% bf16 MFU",
        "step:{i}/500 train_loss:{x} train_time:10ms step_avg:10.00ms",
        "{i} train {x}",
        "step    {i} | loss: {x} | lr 3.0e-04 | norm: 1.0 | dt: 10.00ms | tok/sec: 10.00",
        "[titan] 2025-01-01 - root - INFO - step: {i}  loss: {x}  grad_norm: 1.0  memory: 1.00GiB",
        "01/01/2024 00:00:00 [INFO|DP=0] iteration: {i} / 500 | consumed_tokens: 512 | lm_loss: {x} | grad_norm: 1.0",
        "x | INFO | train_inner | epoch 001:  {i} / 500 loss={x}, ppl=2, num_updates={i}, lr=0.1, gnorm=1.0",
        "Epoch 0:  10%|#  | {i}/500 [00:01<00:01,  1.00it/s, v_num=0, train_loss={x}]",
        "{i}\t{x}",
        '{{"current_steps": {i}, "total_steps": 500, "loss": {x}}}',
    ],
)
def test_a_printed_run_that_dies_is_diverged(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.txt"
    values = [*(f"{x:.4f}" for x in falling(100)), *["NaN" if line.startswith("{{") else "nan"] * 20]
    file.write_text("".join(line.format(i=i, x=x) + "\n" for i, x in enumerate(values, start=1)), encoding="utf-8")
    (block,) = blocks(capsys, file)
    assert (block["verdict"], block["first_bad_step"]) == ("diverged", 101)
    assert block["steps"] == {"first": 1, "last": 120, "values": 120, "stride": 1}


def test_megatron_prints_no_loss_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = " iteration {:8d}/ 500 | lm loss: {:.6E} | grad norm: 1.0 | number of nan iterations:   0 |"
    bad = " iteration {:8d}/ 500 | grad norm: nan | number of nan iterations:   1 |"
    lines = [good.format(i, x) for i, x in enumerate(falling(100), start=1)] + [bad.format(i) for i in range(101, 121)]
    (tmp_path / "megatron.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (block,) = blocks(capsys, tmp_path / "megatron.log")
    assert (block["verdict"], block["first_bad_step"]) == ("diverged", 101)


# The folder of a Trainer, and the rows at the end of its log.


@pytest.mark.parametrize("steps", [(500, 1000), (900, 1000, 1100), (99, 100)])
def test_of_a_trainers_checkpoints_the_last_by_its_number(
    steps: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in sorted(steps, reverse=True):  # so that the oldest is the newest file
        folder = tmp_path / "out" / f"checkpoint-{n}"
        folder.mkdir(parents=True)
        history: list[Row] = [{"loss": loss, "step": i} for i, loss in enumerate(falling(1200)[:n], start=1)]
        history += [{"eval_loss": 3.0, "step": n}, {"train_runtime": 5.0, "train_loss": 3.5, "step": n}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    (block,) = blocks(capsys, tmp_path / "out")
    assert block["steps"]["values"] == max(steps)
    assert f"Read from checkpoint-{max(steps)}/trainer_state.json." in block["notes"]
    assert not any("if it was NaN there" in note for note in block["notes"])


# Gradient norms of steps that fp16 loss scaling skipped.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("steps", [(1, 2), (1, 2, 3, 90), (60, 120, 180)])
def test_norms_of_steps_that_loss_scaling_skipped_are_no_divergence(
    bad: float, steps: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = [
        {"step": i, "loss": loss, "grad_norm": bad if i in steps else 1.0 + 0.01 * (i % 7)}
        for i, loss in enumerate(falling(200), start=1)
    ]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    (block,) = blocks(capsys, file)
    assert (block["verdict"], block["first_bad_step"]) == ("stable", None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_stay_bad_are_a_divergence(bad: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = [
        {"step": i, "loss": x, "grad_norm": bad if i > 150 else 1.0} for i, x in enumerate(falling(200), start=1)
    ]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    (block,) = blocks(capsys, file)
    assert (block["verdict"], block["first_bad_step"]) == ("diverged", 151)


# Healthy pre-training: spikes of a batch that are gone at once, and those that several runs share.


def pre_training(folder: Path, seed: int, batches: Sequence[int], lasts: int = 1, height: float = 0.4) -> Path:
    noise = np.random.default_rng(seed).normal(0, 0.02, 3000)
    loss = 3 + 4 * 0.998 ** np.arange(3000) + noise
    for at in batches:
        loss[at : at + lasts] += height
    return table(folder, [{"step": i, "loss": float(x)} for i, x in enumerate(loss)], f"{seed}.csv")


@pytest.mark.parametrize("n", [2, 3, 9])
def test_batches_that_runs_share_count_against_none(n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [pre_training(tmp_path, seed, (919, 1760, 2300)) for seed in range(n)]
    for block in blocks(capsys, *files):
        assert (block["verdict"], [spike["runs"] for spike in block["shared_spikes"]]) == ("stable", [n] * 3)
    assert f"in up to {n} of {n} logs" in (cli.run(["score", *map(str, files)]), capsys.readouterr().out)[1]


@pytest.mark.parametrize(("spikes", "lasts", "verdict"), [(6, 1, "stable"), (12, 1, "stable"), (12, 60, "spiky")])
def test_spikes_that_are_gone_at_once_are_healthy(
    spikes: int, lasts: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = np.linspace(600, 2800, spikes).astype(int).tolist()
    (block,) = blocks(capsys, pre_training(tmp_path, 0, at, lasts, height=0.4 if lasts == 1 else 1.0))
    assert block["verdict"] == verdict
    assert ("lower learning rate" in block["reason"]) == (verdict == "spiky")


# A counter that begins anew after a resume.


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("parts", [(250, 150), (250, 40, 150), (100, 100, 100, 100)])
def test_a_counter_that_begins_anew_in_one_run_loses_no_row(first: int, parts: tuple[int, ...], tmp_path: Path) -> None:
    true = falling(sum(parts))
    counters = [first + i for part in parts for i in range(part)]
    (log,) = read_logs(jsonl(tmp_path, [{"step": s, "loss": x} for s, x in zip(counters, true, strict=True)]))
    assert losses(log) == true
    assert log.log.step.tolist() == list(range(first, first + sum(parts)))


def test_a_counter_that_begins_anew_with_the_loss_is_another_run(tmp_path: Path) -> None:
    """Also where the first run is an attempt of a few rows."""
    for n in (3, 8, 200):
        rows = [
            {"step": 20 * i, "loss": loss}
            for part in (falling(200)[:n], falling(200, 1))
            for i, loss in enumerate(part)
        ]
        first, second = read_logs(jsonl(tmp_path, rows))
        assert (losses(first), losses(second)) == (falling(200)[:n], falling(200, 1))


def test_a_counter_that_begins_anew_in_a_flat_loss_is_asked_about(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 2.0 + 0.01 * (i % 3)} for _ in range(2) for i in range(100)]
    with pytest.raises(ConfigError, match="--restarts runs, --restarts continue"):
        read_logs(jsonl(tmp_path, rows))
