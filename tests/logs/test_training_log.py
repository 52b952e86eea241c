"""Logs of other people: every format, every name and every defect that is documented."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab.config import ConfigError
from stability_lab.judge.column_names import NAMES
from stability_lab.logs.sources import read_source
from stability_lab.logs.splits import Options
from stability_lab.logs.training_log import NamedLog, read_logs, read_metrics
from stability_lab.text import shown

LOSS = [3.0, 2.5, float("nan"), float("inf"), 1.5]


def read_log(path: Path, **options: Any) -> NamedLog:
    (log,) = read_logs(path, Options(**options))
    return log


def csv_file(folder: Path, *lines: str, name: str = "log.csv") -> Path:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def jsonl_file(folder: Path, rows: Sequence[dict[str, Any]], name: str = "log.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rows(loss: str = "train/loss") -> list[dict[str, Any]]:
    return [{"step": 1 + i, loss: value, "grad_norm": 1.0 + i} for i, value in enumerate(LOSS)]


def as_csv(folder: Path) -> Path:
    words = ("3.0", "2.5", "NaN", "Infinity", "1.5")
    return csv_file(folder, "step,train/loss,grad_norm", *(f"{1 + i},{w},{1 + i}.0" for i, w in enumerate(words)))


def as_jsonl(folder: Path) -> Path:
    return jsonl_file(folder, rows())


def as_json(folder: Path) -> Path:
    file = folder / "log.json"
    file.write_text(json.dumps(rows()), encoding="utf-8")
    return file


def as_trainer_state(folder: Path) -> Path:
    history = [*rows("loss"), {"step": 5, "eval_loss": 2.0}, {"step": 5, "train_loss": 2.2, "train_runtime": 1.0}]
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    return folder


def as_parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows()), folder / "log.parquet")
    return folder / "log.parquet"


def as_wandb(folder: Path, table: Sequence[dict[str, Any]] | None = None) -> Path:
    from stability_lab.tracking.tracker import RunInfo
    from stability_lab.tracking.wandb.wandb_tracker import WandbTracking

    tracker = WandbTracking(mode="offline").start(RunInfo("name", None, (), {}, folder))
    tracker.log(rows() if table is None else table)
    tracker.event({"event": "loss_spike", "step": 2, "value": 2.5})
    tracker.finish({"verdict": "stable"}, 0)
    (file,) = folder.rglob("*.wandb")
    for _ in range(100):  # wandb's process may write the end of the file after finish() has returned
        if b"name" in file.read_bytes() and not read_source(file).notes:
            break
        time.sleep(0.1)
    return file


def as_events(folder: Path) -> Path:
    """The bytes that TensorBoard's writer makes of these rows; see the oracle test below."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(folder / "tb")
    for row in rows():
        writer.add_scalar("train/loss", row["train/loss"], row["step"])
        # The newer way of storing a scalar, as TensorFlow 2 and JAX do it.
        writer.add_scalar("grad_norm", row["grad_norm"], row["step"], new_style=True)
        writer.add_histogram("weights", np.arange(5.0), row["step"])
        writer.add_text("note", "loss", row["step"])
    writer.close()
    return folder / "tb"


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_json, as_trainer_state, as_parquet, as_wandb])
def test_every_format_gives_the_same_log(write: Any, tmp_path: Path) -> None:
    check(read_log(write(tmp_path)).log)


@pytest.mark.oracle
def test_event_files_of_tensorboards_own_writer(tmp_path: Path) -> None:
    folder = as_events(tmp_path)
    named = read_log(folder)
    check(named.log)
    assert named.format == "TensorBoard events"
    assert set(read_source(folder).columns) == {"step", "train/loss", "grad_norm"}


def check(log: Any) -> None:
    assert log.step.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(log.loss, LOSS)
    np.testing.assert_array_equal(log.grad_norm, [1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.oracle
def test_a_resumed_tensorboard_run_has_several_files(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for steps, value, suffix in ((range(1, 9), 1.0, ".first"), (range(6, 12), 1.25, ".second")):
        writer = tensorboard.SummaryWriter(tmp_path, filename_suffix=suffix)
        for step in steps:
            writer.add_scalar("loss", value, step)
        writer.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda file: file.suffix)
    first.rename(tmp_path / "events.out.tfevents.1.a")
    second.rename(tmp_path / "events.out.tfevents.2.a")
    named = read_log(tmp_path)
    assert named.log.step.tolist() == list(range(1, 12))
    assert named.log.loss is not None
    assert named.log.loss.tolist() == [1.0] * 5 + [1.25] * 6
    assert any("falls back once, first to 6" in note for note in named.notes)


@pytest.mark.oracle
def test_an_event_file_that_ends_early_is_read_and_says_so(tmp_path: Path) -> None:
    (file,) = as_events(tmp_path).iterdir()
    data = file.read_bytes()
    assert read_source(file).notes == []
    for cut in (3, 12):
        file.write_bytes(data[:-cut])
        assert read_log(file).log.step.tolist() == [1, 2, 3, 4, 5]
        (note,) = read_source(file).notes
        assert note == "The file ends in the middle of a record, which is left out: 5 rows were read."
    file.write_bytes(data + bytes(1000))
    assert read_log(file).log.step.tolist() == [1, 2, 3, 4, 5]
    assert read_source(file).notes == ["The file ends in 1,000 zero bytes: 5 rows were read."]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(bytes(21) + b"\x1a\rbrain.Event:2" + bytes(4))
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r"which is not installed: pip install 'stability-lab\[tensorboard\]'$"):
        read_log(tmp_path)


@pytest.mark.oracle
def test_an_event_file_that_is_damaged_before_its_end_is_refused(tmp_path: Path) -> None:
    (file,) = as_events(tmp_path).iterdir()
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(data[:middle] + data[middle + 1 :])
    with pytest.raises(ConfigError, match=r"damaged at byte .*, after \d rows$"):
        read_log(file)
    at = data.rindex(b"train/loss")  # one letter of a name, in the last row
    file.write_bytes(data[:at] + b"b" + data[at + 1 :])
    with pytest.raises(ConfigError, match=r"damaged at byte .*, after 4 rows$"):
        read_log(file)


@pytest.mark.slow
def test_a_wandb_file_that_ends_early_is_read_and_says_so(tmp_path: Path) -> None:
    file = as_wandb(tmp_path)
    data = file.read_bytes()
    assert read_source(file).notes == []
    rows_read = len(read_source(file).table)
    file.write_bytes(data[:-20])
    notes = read_source(file).notes
    assert f"The file lacks the end of the run, which may still go on or was killed: {rows_read:,} rows." in notes
    assert any(note.startswith("wandb reached the end of an incomplete") for note in notes)


@pytest.mark.slow
def test_a_wandb_file_that_is_damaged_says_so(tmp_path: Path) -> None:
    file = as_wandb(tmp_path, [{"step": i, "train/loss": 2.0} for i in range(1, 601)])
    assert len(read_source(file).table) == 601  # one of them is the event
    data = bytearray(file.read_bytes())
    data[data.index(b"train/loss", len(data) // 2)] ^= 0xFF
    file.write_bytes(data)
    source = read_source(file)
    (note,) = source.notes
    assert 0 < len(source.table) < 601
    assert note.startswith("wandb skipped corrupt data: ")
    assert note.endswith(f": {len(source.table):,} rows were read.")


def test_a_trainer_state_says_what_it_hides(tmp_path: Path) -> None:
    named = read_log(as_trainer_state(tmp_path))
    assert named.columns == {"loss": "loss", "grad_norm": "grad_norm", "step": "step"}
    assert any("logging_nan_inf_filter" in note for note in named.notes)
    assert "2 of 7 rows have no loss and no grad_norm." in named.notes


def test_parquet_by_pandas_says_what_it_hides(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame(rows()).to_parquet(tmp_path / "log.parquet")
    assert any("pandas writes NaN as a missing value" in note for note in read_log(tmp_path / "log.parquet").notes)


@pytest.mark.parametrize(
    "column",
    ["loss", "Loss", "train/loss", "train_loss", "training loss", "train/CrossEntropyLoss", "train/CE loss", "lm loss"],
)
def test_common_names_of_the_loss(column: str, tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, f"Step,val/loss,{column}", "1,9,2.0", "2,9,1.0"))
    assert named.columns == {"loss": column, "step": "Step"}


@pytest.mark.parametrize(
    "column",
    ["grad_norm", "grad-norm", "Gradient Norm", "train/grad_norm", "optim/total_grad_norm", "optim/total grad norm"],
)
def test_common_names_of_the_gradient_norm(column: str, tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, f"iter,{column}", "1,2.0", "2,1.0"))
    assert named.columns == {"grad_norm": column, "step": "iter"}
    assert named.log.loss is None


def test_names_are_spelled_as_they_are_compared() -> None:
    for names in NAMES.values():
        assert len(set(names)) == len(names)
        assert all(name == name.lower() and not set(name) & set(" -.") for name in names)


def test_the_cross_entropy_is_preferred_and_said(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step,loss,train/CrossEntropyLoss", "1,3,2.0", "2,3,1.0")
    named = read_log(file)
    assert named.columns["loss"] == "train/CrossEntropyLoss"
    assert "The loss is train/CrossEntropyLoss; --loss takes another, such as loss." in named.notes
    assert read_log(file, loss="loss").columns["loss"] == "loss"


def test_a_chart_exported_from_wandb(tmp_path: Path) -> None:
    header = '"Step","my run - train/loss","my run - train/loss__MIN","my run - train/loss__MAX"'
    named = read_log(csv_file(tmp_path, header, '"10","2.5","2.5","2.5"', '"20","2.25","2.25","2.25"'))
    assert named.columns == {"loss": "my run - train/loss", "step": "Step"}
    assert named.log.stride == 10


def test_named_columns(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "t;a;b", "10;1.5;7", "20;2.5;8")
    named = read_log(file, loss="a", grad_norm="b", step="t")
    assert named.columns == {"loss": "a", "grad_norm": "b", "step": "t"}
    assert named.log.step.tolist() == [10, 20]
    with pytest.raises(ConfigError, match=r"^--loss=c: .* has no such column; its columns are t, a, b$"):
        read_log(file, loss="c")


def test_no_known_column_lists_those_there(tmp_path: Path) -> None:
    names = [f"column{i}" for i in range(40)]
    with pytest.raises(ConfigError, match=r"its columns are column0, .*column29 and 10 more$"):
        read_log(csv_file(tmp_path, ",".join(names), ",".join("1" * 40)))


def test_a_column_of_words_is_no_series(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step,loss", "1,low", "2,high")
    with pytest.raises(ConfigError, match="holds no number"):
        read_log(file, loss="loss")
    with pytest.raises(ConfigError, match="cannot be judged: the column loss holds no number but 'low'"):
        read_log(file)


def test_validation_rows_are_left_out(tmp_path: Path) -> None:
    lines = ["step,train/loss,val/loss"]
    for step in range(1, 7):
        lines += [f"{step},{step}.5,"] + ([f"{step},,9.0"] if step % 3 == 0 else [])
    named = read_log(csv_file(tmp_path, *lines))
    assert named.log.step.tolist() == [1, 2, 3, 4, 5, 6]
    assert named.notes == ["2 of 8 rows have no train/loss."]


def test_an_end_without_values_is_said(tmp_path: Path) -> None:
    lines = ["step,loss,grad_norm", *(f"{s},2.0,1.0" for s in range(1, 6)), *(f"{s},,1.0" for s in range(6, 10))]
    notes = read_log(csv_file(tmp_path, *lines)).notes
    assert "The last 4 rows have no loss: if it was NaN there, the file does not show it." in notes


def steps_and_values(folder: Path, steps: Sequence[int]) -> tuple[list[int], list[float], list[str]]:
    """The log of rows with these steps, each with its position as its loss."""
    named = read_log(csv_file(folder, "step,loss", *(f"{step},{i}" for i, step in enumerate(steps))))
    assert named.log.loss is not None
    return named.log.step.tolist(), named.log.loss.tolist(), named.notes


@pytest.mark.parametrize(
    ("steps", "kept", "values"),
    [
        # Resumed once from step 5, then twice.
        ([1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 7, 8, 9, 10]),
        ([*range(1, 21), *range(15, 19), *range(17, 30)], [*range(1, 30)], [*range(14), 20, 21, *range(24, 37)]),
        # Resumed, and not yet as far as it had been: the old end is no part of the run.
        ([1, 2, 3, 4, 5, 6, 3, 4], [1, 2, 3, 4], [0, 1, 6, 7]),
        # Every tenth step logged, resumed at 55: no step occurs twice.
        ([10, 20, 30, 40, 50, 60, 70, 55, 65], [10, 20, 30, 40, 50, 55, 65], [0, 1, 2, 3, 4, 7, 8]),
    ],
)
def test_of_a_resumed_log_the_later_values_win(
    steps: list[int], kept: list[int], values: list[float], tmp_path: Path
) -> None:
    found_steps, found_values, notes = steps_and_values(tmp_path, steps)
    assert (found_steps, found_values) == (kept, values)
    assert len(notes) == 1
    assert "later values win" in notes[0]


def test_rows_in_no_order_are_sorted(tmp_path: Path) -> None:
    steps, values, notes = steps_and_values(tmp_path, [9, 8, 7, 6, 5, 4, 3, 2, 1])
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert values == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert notes == ["The rows are not in order of steps and were sorted."]


def test_of_several_values_a_step_the_last_counts(tmp_path: Path) -> None:
    steps, values, notes = steps_and_values(tmp_path, [1, 1, 2, 3])
    assert (steps, values) == ([1, 2, 3], [1, 2, 3])
    assert notes == ["loss: 1 value had a step that a later one has too, which counts."]
    with pytest.raises(ConfigError, match="3 of 3 steps have several values of loss, such as 0 and 1 at 1: --r"):
        steps_and_values(tmp_path, [1, 1, 2, 2, 3, 3])


def test_without_steps_rows_are_counted(tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "loss,lr", "3,0.1", "2,0.2", "1,0.3"))
    assert named.log.step.tolist() == [1, 2, 3]
    assert named.log.lr is not None
    assert named.log.lr.tolist() == [0.1, 0.2, 0.3]
    assert "step" not in named.columns
    assert any("rows are counted as steps" in note for note in named.notes)


@pytest.mark.parametrize(("bad", "what"), [("1.5", "no whole number"), ("1e300", "too large for a step")])
def test_a_step_is_a_whole_number(bad: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the step column step holds .*, which is {what}; --step COLUMN"):
        read_log(csv_file(tmp_path, "step,loss", "1.0,3", f"{bad},2"))


@pytest.mark.parametrize("bad", ["nan", "NaN", "inf", "n/a", "", "oops"])
def test_a_row_without_a_step_is_left_out(bad: str, tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "step,loss", "1,3", f"{bad},2.9", "3,2.8", "4,2.7"))
    assert named.log.step.tolist() == [1, 3, 4]
    assert "1 row with a value has no step and is left out." in named.notes


def test_a_header_that_comes_again_is_no_row(tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "step,loss", "1,3.0", "2,2.9", "step,loss", "3,2.8", "4,2.7"))
    assert named.log.step.tolist() == [1, 2, 3, 4]
    assert named.notes == ["1 line with the header again: left out."]


def test_a_counter_of_log_calls_is_the_last_resort(tmp_path: Path) -> None:
    both = jsonl_file(tmp_path, [{"_step": i, "train": {"global_step": 10 * i}, "loss": 1.0} for i in range(3)])
    assert read_log(both).log.step.tolist() == [0, 10, 20]
    sparse = [{"_step": i, "loss": 1.0, **({"global_step": i} if i == 7 else {})} for i in range(9)]
    assert read_log(jsonl_file(tmp_path, sparse)).columns["step"] == "_step"


def test_signals_at_different_steps_stand_in_one_log(tmp_path: Path) -> None:
    table = [
        {"iter": i, "grad_norm": float(i), "lr": i / 100} | ({"loss": 2.0} if i % 5 == 0 else {}) for i in range(20)
    ]
    log = read_log(jsonl_file(tmp_path, table)).log
    assert log.step.tolist() == list(range(20))
    assert log.having("loss").step.tolist() == [0, 5, 10, 15]
    assert (log.having("grad_norm") is log, log.no_grad_norm) == (True, None)
    assert log.lr is not None
    assert log.lr.tolist() == [i / 100 for i in range(20)]


def test_signals_in_rows_of_their_own_meet_at_their_step(tmp_path: Path) -> None:
    table: list[dict[str, Any]] = []
    for i in range(1, 6):
        table += [{"step": i, "loss": 2.0 + i}, {"step": i, "grad_norm": 1.0 * i}, {"step": i, "lr": 0.1 * i}]
    named = read_log(jsonl_file(tmp_path, table))
    assert named.log.step.tolist() == [1, 2, 3, 4, 5]
    assert named.log.loss is not None
    assert named.log.lr is not None
    assert (named.log.no_loss, named.log.no_grad_norm) == (None, None)
    assert named.log.loss.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert named.log.lr.tolist() == [0.1 * i for i in range(1, 6)]
    assert not any("later" in note for note in named.notes)


def test_companions_are_taken_along(tmp_path: Path) -> None:
    table: list[dict[str, Any]] = [
        {"step": i, "loss": 2.0, "optim/lr": 1e-3, "tokens": 16 * i, "optim/skipped": float(i == 2)}
        | ({"attn/max_logit": 3.0} if i == 3 else {})
        for i in (1, 2, 3)
    ]
    log = read_log(jsonl_file(tmp_path, table)).log
    assert log.lr is not None
    assert log.tokens is not None
    assert log.skipped is not None
    assert log.lr.tolist() == [1e-3] * 3
    assert log.tokens.tolist() == [16.0, 32.0, 48.0]
    assert log.skipped.tolist() == [False, True, False]
    np.testing.assert_array_equal(log.max_attn_logit, [np.nan, np.nan, 3.0])


def test_any_column_as_a_metric(tmp_path: Path) -> None:
    file = jsonl_file(tmp_path, [{"step": i, "attn/max": float(i)} for i in (2, 4, 6)])
    ((series, _, notes),) = read_metrics(file, "attn/max")
    assert series.step.tolist() == [2, 4, 6]
    assert series.value.tolist() == [2.0, 4.0, 6.0]
    assert notes == ["One value every 2 steps: windows count values, not steps."]
    with pytest.raises(ConfigError, match=r"^--metric=attn/maxx: .*did you mean attn/max\?$"):
        read_metrics(file, "attn/maxx")


def test_strange_lines_in_jsonl_are_said(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "loss": 2.0})
    killed = csv_file(tmp_path, good, "", '{"step": 2, "lo')
    killed.write_text(killed.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    assert read_source(killed).notes == ["The last line is unfinished and left out."]
    mixed = csv_file(tmp_path, good, "WARNING: hot", "[1]", good.replace("1", "3"))
    assert read_source(mixed).notes == ["2 lines are no JSON objects and left out, the first is line 2."]
    ended = csv_file(tmp_path, good, "The end.")
    assert read_source(ended).notes == ["1 lines are no JSON objects and left out, the first is line 2."]


def test_words_for_nothing_are_no_words_in_json_either(tmp_path: Path) -> None:
    table = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": "null"},
        {"step": 3, "loss": "N/A"},
        {"step": 4, "loss": 1.5},
    ]
    assert read_log(jsonl_file(tmp_path, table)).notes == ["2 of 4 rows have no loss."]


def test_text_of_other_encodings(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "log.csv").write_text("step,loss\n1,2.5\n", encoding=encoding)
        assert read_log(tmp_path / "log.csv").columns == {"loss": "loss", "step": "step"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"step,loss\n", "holds no row"),
        (b"[]", "holds no row"),
        (b'{"log_history": []}', "holds no row"),
        (b"{" * 9, "neither JSON nor"),
        (b"\x00\x01\x02\x03" * 50, "of no known format"),
        (b"PAR1 and nothing else", "cannot be read"),
        (b":W&B and nothing else", "cannot be read: wandb cannot read it"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_what_is_no_log_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_log(tmp_path / "log")
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_log(tmp_path / "nothing.csv")
    with pytest.raises(ConfigError, match="holds no log: give a run's folder"):
        read_log(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"holds 2 logs: give one of .*/a, .*/b$"):
        read_log(tmp_path)


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    assert shown("a\x1b[31m\n\u202eé\udc80") == "a\\x1b[31m\\n\\u202eé\\udc80"
    with pytest.raises(ConfigError) as caught:
        read_log(csv_file(tmp_path, "a\x1b[2J,b", "1,2"))
    assert "\x1b" not in str(caught.value)


def test_a_loss_that_is_nearly_empty_is_passed_over(tmp_path: Path) -> None:
    table: list[dict[str, Any]] = [{"step": i, "loss": 2.0, "grad_norm": 1.0} for i in range(1, 301)]
    table[0]["train/ce_loss"] = 2.0
    named = read_log(jsonl_file(tmp_path, table))
    assert (named.columns["loss"], named.log.step.size) == ("loss", 300)
    assert "The loss is loss; --loss takes another, such as train/ce_loss." in named.notes
    for row in table[:150]:
        row["train/ce_loss"] = 2.0
    assert read_log(jsonl_file(tmp_path, table)).columns["loss"] == "train/ce_loss"


EXPORT = (
    '"Step","a - train/loss","a - train/loss__MIN","b - train/loss","b - train/grad_norm"',
    "1,2.0,2.0,3.0,1.5",
    "2,1.9,1.9,,",
    "3,,,2.8,1.4",
)


def test_runs_of_one_wandb_export_are_never_mixed(tmp_path: Path) -> None:
    first, second = read_logs(csv_file(tmp_path, *EXPORT))
    assert (first.run, first.columns) == ("a", {"loss": "a - train/loss", "step": "Step"})
    assert first.log.step.tolist() == [1, 2]
    assert second.run == "b"
    assert second.columns == {"loss": "b - train/loss", "grad_norm": "b - train/grad_norm", "step": "Step"}
    assert second.log.step.tolist() == [1, 3]
    assert not any("rows have no" in note for note in (*first.notes, *second.notes))


def test_a_run_of_an_export_is_chosen_by_its_column(tmp_path: Path) -> None:
    file = csv_file(tmp_path, *EXPORT)
    (only,) = read_logs(file, Options(loss="b - train/loss"))
    assert only.run == "b"
    assert [log.run for log in read_logs(file, Options(loss="train/loss"))] == ["a", "b"]
    with pytest.raises(ConfigError, match="run a has no such column"):
        read_logs(file, Options(loss="a - train/loss", grad_norm="b - train/grad_norm"))
    assert [source.run for _, source, _ in read_metrics(file, "a - train/loss")] == ["a"]


def test_a_folder_of_our_runs_is_one_log_a_run(tmp_path: Path) -> None:
    for name in ("b", "a"):
        folder = tmp_path / "runs" / name
        (folder / "wandb" / "offline-run-1").mkdir(parents=True)
        (folder / "wandb" / "offline-run-1" / "run-1.wandb").write_bytes(b":W&B")
        (folder / "manifest.json").write_text("{}", encoding="utf-8")
        jsonl_file(folder, rows(), "metrics.jsonl")
    logs = read_logs(tmp_path)
    assert [log.source for log in logs] == [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert {log.format for log in logs} == {"run folder"}
    csv_file(tmp_path, "step,loss", "1,2.0", name="metrics.csv")
    assert [log.format for log in read_logs(tmp_path)] == ["CSV"]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("2.0 nats", "1.9 nats"), "the column loss holds no number but '2.0 nats'"),
        (("True", "False"), "the column loss holds no number but 'True'"),
        (("1_000", "1_000"), "the column loss holds no number but '1_000'"),
    ],
)
def test_a_column_without_numbers_is_named(cells: tuple[str, ...], words: str, tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step;loss", *(f"{1 + i};{cell}" for i, cell in enumerate(cells)))
    with pytest.raises(ConfigError) as caught:
        read_log(file)
    assert words in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read_log(file, loss="loss")
    assert words in str(caught.value)
    norm = csv_file(tmp_path, "step;loss;gnorm", *(f"{1 + i};{cell};1.0" for i, cell in enumerate(cells)))
    assert any(words in note for note in read_log(norm).notes)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_decimal_commas(delimiter: str, tmp_path: Path) -> None:
    lines = ("step;loss;gnorm", "1;2,5;1", "2;NaN;1,25", "3;2,4e-1;-inf", "4;;0,125")
    named = read_log(csv_file(tmp_path, *(line.replace(";", delimiter) for line in lines)))
    np.testing.assert_array_equal(named.log.loss, [2.5, np.nan, 0.24, np.nan])
    np.testing.assert_array_equal(named.log.grad_norm, [1.0, 1.25, -np.inf, 0.125])
    assert named.log.no_loss is not None
    assert named.log.no_loss.tolist() == [False, False, False, True]
    assert named.notes == ["Its numbers have decimal commas."]


def test_a_comma_that_may_separate_thousands_is_no_decimal_comma(tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "step;loss", "1,000;2.5", "2,000;2.25"))
    assert named.log.step.tolist() == [1000, 2000]
    with pytest.raises(ConfigError, match="the column loss holds no number but '2,500'"):
        read_log(csv_file(tmp_path, "step;loss", "1;2,500", "2;2,250"))


def test_words_among_numbers_are_counted(tmp_path: Path) -> None:
    notes = read_log(csv_file(tmp_path, "step,loss", "1,2.0", "2,oops", "3,", "4,2.0")).notes
    assert "1 cell of loss is no number and left out: 'oops'." in notes
    assert "2 of 4 rows have no loss." in notes
    assert read_log(csv_file(tmp_path, "step,loss", "1,2.0", "2,", "3,2.0")).notes == ["1 of 3 rows has no loss."]


def test_truth_values_mark_skipped_steps(tmp_path: Path) -> None:
    log = read_log(csv_file(tmp_path, "step,loss,skipped", "1,2.0,False", "2,2.0,True")).log
    assert log.skipped is not None
    assert log.skipped.tolist() == [False, True]


def test_comments_above_a_table(tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "# run 7", "# lr, 0.1", "step,loss", "1,2.0", "2,1.5"))
    assert named.columns == {"loss": "loss", "step": "step"}
    assert "2 lines of comments above the table are left out." in named.notes
    savetxt = read_log(csv_file(tmp_path, "# step,loss", "1,2.0", "2,1.5"))
    assert savetxt.log.step.tolist() == [1, 2]
    assert savetxt.notes == []


def test_a_name_that_occurs_twice_hides_nothing(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step,loss,loss", "1,2.0,7.0", "2,1.5,8.0")
    named = read_log(file)
    assert named.log.loss is not None
    assert named.log.loss.tolist() == [2.0, 1.5]
    assert "The header names loss 2 times: the first is loss, the next loss (2)." in named.notes
    other = read_log(file, loss="loss (2)").log.loss
    assert other is not None
    assert other.tolist() == [7.0, 8.0]


@pytest.mark.parametrize("rows", [("1,2.0", "2,1.5"), ("1,2.0,1.0,9", "2,1.5"), ("1,2.0", "2,1.5,1.0,,")])
def test_rows_may_be_shorter_or_longer_than_the_header(rows: tuple[str, ...], tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "step,loss,lr", *rows))
    assert named.log.step.tolist() == [1, 2]
    assert named.log.loss is not None
    assert named.log.loss.tolist() == [2.0, 1.5]


def test_an_unfinished_last_line_of_a_table_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,grad_norm\n1,2.0,1.0\n2,1.9,1.0\n3,1.", encoding="utf-8")
    named = read_log(tmp_path / "log.csv")
    assert named.log.step.tolist() == [1, 2]
    assert "The last line is unfinished and left out." in named.notes


def test_a_chart_exported_from_tensorboard(tmp_path: Path) -> None:
    lines = ("Wall time,Step,Value", "1700000000.1,10,2.5", "1700000001.1,20,2.25")
    loss = read_log(csv_file(tmp_path, *lines, name="run-a_b-tag-train_loss.csv"))
    assert (loss.columns, loss.log.stride) == ({"loss": "train_loss", "step": "Step"}, 10)
    norm = read_log(csv_file(tmp_path, *lines, name="run-a-tag-optim_grad_norm.csv"))
    assert norm.columns == {"grad_norm": "optim_grad_norm", "step": "Step"}
    unnamed = csv_file(tmp_path, *lines, name="download.csv")
    assert read_log(unnamed, loss="Value").log.step.tolist() == [10, 20]
    with pytest.raises(ConfigError, match=r"--loss COLUMN, .*its columns are Wall time, Step, Value"):
        read_log(unnamed)


def test_a_step_that_stands_still_is_no_step(tmp_path: Path) -> None:
    named = read_log(csv_file(tmp_path, "step,global_step,loss", *(f"0,{i},2.0" for i in range(5, 9))))
    assert named.columns["step"] == "global_step"
    assert "The column step is 0 throughout and no step." in named.notes
    alone = csv_file(tmp_path, "step,loss", *("0,2.0" for _ in range(4)))
    assert read_log(alone).log.step.tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"^--step=step: in .* it is 0 throughout$"):
        read_log(alone, step="step")


def test_steps_that_begin_anew_each_epoch_are_numbered_through(tmp_path: Path) -> None:
    steps, values, notes = steps_and_values(tmp_path, [step for _ in range(5) for step in range(1, 101)])
    assert steps == list(range(1, 501))
    assert values == list(range(500))
    assert notes == [
        "The steps begin anew 4 times, first at 1 after 100, and the values go on: they were numbered through."
    ]
    steps, values, _ = steps_and_values(tmp_path, [0, 10, 20, 0, 10, 20, 0, 10])
    assert (steps, values) == ([0, 10, 20, 30, 40, 50, 60, 70], list(range(8)))


def test_a_step_that_goes_through_is_better_than_one_of_an_epoch(tmp_path: Path) -> None:
    table = [{"step": 1 + i % 10, "global_step": 1 + i, "loss": 2.0} for i in range(30)]
    named = read_log(jsonl_file(tmp_path, table))
    assert (named.columns["step"], named.log.step.size) == ("global_step", 30)


def test_a_counter_that_begins_anew_in_a_run_that_goes_on_is_numbered_through(tmp_path: Path) -> None:
    steps, values, notes = steps_and_values(tmp_path, [*range(1, 50), *range(1, 70), *range(1, 90)])
    assert steps == list(range(1, 208))
    assert values == list(range(207))
    assert "begin anew 2 times" in notes[0]


def test_thousands_in_steps(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step,loss", "998,2.0", "999,2.0", '"1,000",2.0', '"1,001",2.0')
    assert read_log(file).log.step.tolist() == [998, 999, 1000, 1001]


def test_values_of_windows_are_values(tmp_path: Path) -> None:
    log = read_log(csv_file(tmp_path, "step,loss", "1,2.0", "2,-nan(ind)", "3,1.#INF", "4,-1.#IND")).log
    np.testing.assert_array_equal(log.loss, [2.0, np.nan, np.inf, np.nan])


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no regular file"):
        read_log(tmp_path / "pipe")


def test_a_gradient_norm_asked_for_as_the_loss_is_said(tmp_path: Path) -> None:
    file = csv_file(tmp_path, "step,loss,grad_norm", "1,2.0,1.0", "2,2.0,1.0")
    named = read_log(file, loss="grad_norm")
    assert named.columns == {"loss": "grad_norm", "step": "step"}
    assert "grad_norm is judged as a loss, but its name is that of a gradient norm." in named.notes
