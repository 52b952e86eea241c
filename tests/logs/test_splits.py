"""Which rows are one run's training: layouts of one true series come back as it, as several runs, or are refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab.config import ConfigError
from stability_lab.logs.splits import Options
from stability_lab.logs.training_log import NamedLog, read_logs

Row = dict[str, Any]


def curve(n: int, seed: int = 0, level: float = 2.0) -> list[float]:
    noise = 0.02 * np.random.default_rng(seed).normal(size=n)
    return [round(float(x), 6) for x in level + 3 * np.exp(-np.arange(n) / (n / 6)) + noise]


def rows_of(losses: Sequence[float], first: int = 1, every: int = 1, **more: Any) -> list[Row]:
    return [{"step": first + every * i, "loss": loss, **more} for i, loss in enumerate(losses)]


def written(folder: Path, rows: Sequence[Row], as_csv: bool = False) -> Path:
    file = folder / ("log.csv" if as_csv else "log.jsonl")
    if as_csv:
        names = list(dict.fromkeys(key for row in rows for key in row))
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, names)
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def losses_of(log: NamedLog) -> list[float]:
    assert log.log.loss is not None
    return log.log.loss[log.log.has("loss")].tolist()


def test_rows_of_validation_with_a_learning_rate_and_a_counter_of_their_own(tmp_path: Path) -> None:
    rows = rows_of(curve(30), first=10, every=10, lr=0.1)
    rows.insert(15, {"step": 8, "lr": 0.1, "mIoU": 0.5})
    (log,) = read_logs(written(tmp_path, rows))
    assert losses_of(log) == curve(30)
    assert log.left_out == {"without a value": 1}
    (last,) = read_logs(written(tmp_path, [*rows_of(curve(2), lr=0.1), {"step": 1, "lr": 0.1, "mIoU": 0.5}]))
    assert last.log.step.tolist() == [1, 2]


@pytest.mark.parametrize("column", ["split", "mode", "phase", "train/split"])
@pytest.mark.parametrize("word", ["val", "Validation", "eval", "test"])
def test_rows_of_another_split(column: str, word: str, tmp_path: Path) -> None:
    rows: list[Row] = []
    for i, loss in enumerate(curve(60)):
        rows.append({column: "train", "step": i, "loss": loss})
        if i % 20 == 19:
            rows.append({column: word, "step": i, "loss": 6.0})
    (log,) = read_logs(written(tmp_path, rows))
    assert losses_of(log) == curve(60)
    assert f"3 rows of validation (by the column {column}) are left out." in log.notes
    (other,) = read_logs(written(tmp_path, rows), Options(split=word))
    assert losses_of(other) == [6.0] * 3
    with pytest.raises(ConfigError, match=r"^--split=nothing: "):
        read_logs(written(tmp_path, rows), Options(split="nothing"))


@pytest.mark.parametrize(
    ("column", "train", "val"),
    [
        *[
            ("is_train", "True", "False"),
            ("training", "1", "0"),
            ("is_val", "false", "true"),
            ("data/is_eval", "0", "1"),
        ],
        *[("type", "train", "eval"), ("event", "train_step", "eval_step"), ("stage", "fit", "validate")],
    ],
)
def test_rows_of_validation_are_told_by_truth_values_and_events(
    column: str, train: str, val: str, tmp_path: Path
) -> None:
    """They are left out whatever share of the steps they have, and a log of nothing else is refused."""
    rows: list[Row] = []
    for i, loss in enumerate(curve(60)):
        rows.append({column: train, "step": i, "loss": loss})
        rows += [{column: val, "step": i, "loss": 6.0}] if i % 20 == 19 else []
    (log,) = read_logs(written(tmp_path, rows, as_csv=True))
    assert losses_of(log) == curve(60)
    assert log.left_out == {f"of validation (by the column {column})": 3}
    alone = written(tmp_path, [row for row in rows if row[column] == val])
    with pytest.raises(ConfigError, match=f"has no training: by the column {column} all of its rows are of val") as no:
        read_logs(alone)
    word = str(no.value).split("--split ")[1].split()[0]
    (judged,) = read_logs(alone, Options(split=word))
    assert losses_of(judged) == [6.0] * 3
    (asked_for,) = read_logs(alone, Options(loss="loss"))
    assert losses_of(asked_for) == [6.0] * 3


def test_a_column_that_only_sounds_like_a_split_is_none(tmp_path: Path) -> None:
    rows = [
        row | {"train": 0.5, "val": float(i % 2), "test": 1, "kind": "test-lr"}
        for i, row in enumerate(rows_of(curve(40)))
    ]
    rows[3].pop("val")
    (log,) = read_logs(written(tmp_path, rows))
    assert losses_of(log) == curve(40)


@pytest.mark.parametrize("share", [1, 3, 6])
@pytest.mark.parametrize("after", [True, False])
def test_losses_of_one_step_that_no_noise_explains_are_refused(share: int, after: bool, tmp_path: Path) -> None:
    rows: list[Row] = []
    for i, row in enumerate(rows_of(curve(60))):
        other = [row | {"loss": row["loss"] + 0.6}] if i % (60 // share) == 59 // share else []
        rows += [row, *other] if after else [*other, row]
    with pytest.raises(
        ConfigError, match=f"{share} of 60 steps ha(s|ve) several values of loss, such as .* at .*--split"
    ):
        read_logs(written(tmp_path, rows))
    rows = rows_of(curve(60))
    (log,) = read_logs(written(tmp_path, [rows[0] | {"loss": rows[0]["loss"] + 0.05}, *rows]))
    assert losses_of(log) == curve(60)


def test_a_step_that_was_tried_again_after_nan_counts_as_it_was_then(tmp_path: Path) -> None:
    rows = rows_of(curve(40))
    rows.insert(20, rows[20] | {"loss": "NaN"})
    (log,) = read_logs(written(tmp_path, rows))
    assert losses_of(log) == curve(40)


def test_a_phase_of_training_is_no_split(tmp_path: Path) -> None:
    rows = [row | {"phase": "warmup" if i < 10 else "decay"} for i, row in enumerate(rows_of(curve(40)))]
    (log,) = read_logs(written(tmp_path, rows))
    assert losses_of(log) == curve(40)


@pytest.mark.parametrize("column", ["model", "run", "seed", "whatever it is"])
@pytest.mark.parametrize("order", ["stacked", "interleaved"])
def test_several_runs_in_one_table(column: str, order: str, tmp_path: Path) -> None:
    words: list[Any] = [1, 2, 3] if column == "seed" else ["a", "b", "c"]
    runs = {word: rows_of(curve(50, seed=i), first=0, every=1, **{column: word}) for i, word in enumerate(words)}
    rows = [row for run in runs.values() for row in run]
    if order == "interleaved":
        rows.sort(key=lambda row: row["step"])
    logs = read_logs(written(tmp_path, rows, as_csv=True))
    assert [log.run for log in logs] == [str(word) for word in words]
    assert [losses_of(log) for log in logs] == [curve(50, seed=i) for i in range(3)]


def test_a_divergence_is_not_hidden_by_the_next_run(tmp_path: Path) -> None:
    lines = ["model,step,train_loss", "a,0,5", "a,1,4", "a,2,nan", "b,0,5", "b,1,4", "b,2,3"]
    file = tmp_path / "t.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = read_logs(file)
    assert (first.run, second.run) == ("a", "b")
    assert np.isnan(losses_of(first)[-1])


def test_two_columns_may_be_needed(tmp_path: Path) -> None:
    rows = [
        row
        for model in ("a", "b")
        for seed in (0, 1)
        for row in rows_of(curve(30, seed=seed, level=2.0 + (model == "b")), model=model, seed=seed)
    ]
    logs = read_logs(written(tmp_path, rows))
    assert [log.run for log in logs] == ["a, 0", "a, 1", "b, 0", "b, 1"]


def test_the_user_names_the_column(tmp_path: Path) -> None:
    rows = rows_of(curve(30), kind="x") + rows_of(curve(30, seed=1), first=31, kind="y")
    assert len(read_logs(written(tmp_path, rows))) == 1  # one run whose steps go on
    assert [log.run for log in read_logs(written(tmp_path, rows), Options(runs_by="kind"))] == ["x", "y"]
    with pytest.raises(ConfigError, match=r"^--runs-by=kin: .* did you mean kind"):
        read_logs(written(tmp_path, rows), Options(runs_by="kin"))


@pytest.mark.parametrize("n", [2, 3])
def test_runs_below_each_other_without_a_name(n: int, tmp_path: Path) -> None:
    rows = [row for seed in range(n) for row in rows_of(curve(200, seed))]
    logs = read_logs(written(tmp_path, rows))
    assert [log.run for log in logs] == [f"{i} of {n}" for i in range(1, n + 1)]
    assert [losses_of(log) for log in logs] == [curve(200, seed) for seed in range(n)]
    (one,) = read_logs(written(tmp_path, rows), Options(restarts="continue"))
    assert one.log.step.tolist() == list(range(1, 200 * n + 1))


def test_a_counter_within_epochs_is_numbered_through(tmp_path: Path) -> None:
    losses = curve(690)
    rows = [{"step": 1 + i % 69, "loss": loss} for i, loss in enumerate(losses)]
    (log,) = read_logs(written(tmp_path, rows))
    assert log.log.step.tolist() == list(range(1, 691))
    flat = [{"step": 1 + i % 69, "loss": 2.0 + 0.01 * (i % 7)} for i in range(690)]
    with pytest.raises(ConfigError, match="--restarts runs, --restarts continue"):
        read_logs(written(tmp_path, flat))
    epochs = [row | {"epoch": i // 69} for i, row in enumerate(flat)]
    assert len(losses_of(read_logs(written(tmp_path, epochs))[0])) == 690
    assert len(read_logs(written(tmp_path, flat), Options(restarts="runs"))) == 10


def test_a_resume_with_other_values_is_refused(tmp_path: Path) -> None:
    rows = rows_of(curve(300)) + rows_of([9.0] * 50, first=200)
    with pytest.raises(
        ConfigError, match=r"falls back to 200, and the values from there on \(9\) are not those of a run"
    ):
        read_logs(written(tmp_path, rows))


def test_two_values_for_most_steps_in_no_order_are_refused(tmp_path: Path) -> None:
    rows = rows_of(curve(50)) + rows_of(curve(50, seed=1))
    rows = [rows[i] for i in np.random.default_rng(0).permutation(100)]
    with pytest.raises(ConfigError, match="in no order of steps, and some steps have several values"):
        read_logs(written(tmp_path, rows))


# Random layouts of one true series: it comes back, or the log is refused; never another series.


def _validation(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    column = rng.choice(["split", "mode", "stage"])
    out = []
    for row in rows:
        out.append({**row, column: "train"})
        if rng.uniform() < 0.1:
            out.append({"step": row["step"], "loss": 7.0, column: "val"})
    return out


def _other_keys(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    out = list(rows)
    for at in sorted(rng.integers(0, len(rows), size=5).tolist(), reverse=True):
        out.insert(at, {"step": int(rng.integers(0, 10)), "lr": 0.1, "val/loss": 7.0})
    return out


def _resumed(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    at = int(rng.integers(len(rows) // 3, len(rows) - 5))
    again = [row for row in rows[at : at + int(rng.integers(1, 30))] if "loss" in row]
    lost = [{**row, "loss": row["loss"] + 0.01} for row in again]
    return rows[:at] + lost + rows[at:]


def _epochs(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    length = int(rng.integers(20, 60))
    return [{**row, "step": row["step"] % length, "epoch": row["step"] // length} for row in rows]


def _stacked(rng: np.random.Generator, rows: list[Row], column: str = "run") -> list[Row]:
    other = rows_of(curve(len(rows), seed=99))
    return [{**row, column: "true"} for row in rows] + [{**row, column: "other"} for row in other]


def _interleaved(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return sorted(_stacked(rng, rows, "model"), key=lambda row: row["step"])


def _shuffled(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return [rows[i] for i in rng.permutation(len(rows))]


def _counted_from_zero(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return [{**row, "step": row["step"] - 1} for row in rows]


def _strided(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return [{**row, "step": 10 * row["step"]} for row in rows]


def _printed_twice(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    """As two ranks do, or a writer that was flushed twice, in a few places."""
    twice = set(rng.integers(0, len(rows), size=len(rows) // 20).tolist())
    return [row for i, row in enumerate(rows) for _ in range(1 + (i in twice))]


def _rows_of_other_signals(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    """Gradient norm and learning rate in rows of their own, at fewer steps."""
    out = []
    for i, row in enumerate(rows):
        out.append(row)
        if i % 7 == 0:
            out.append({key: value for key, value in row.items() if key != "loss"} | {"grad_norm": 1.0, "lr": 0.1})
    return out


def _steps_of_a_total(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return [{**row, "step": f"{row['step']}/100000"} for row in rows]


def _without_steps(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "step"} for row in rows]


# Without a step nothing tells a row from its repetition, or their order.
NEED_STEPS = {"_shuffled", "_resumed", "_printed_twice"}
# These come last, for others reckon with the step.
LAST: tuple[Callable[[np.random.Generator, list[Row]], list[Row]], ...] = (_steps_of_a_total, _without_steps)
LAYOUTS: tuple[Callable[[np.random.Generator, list[Row]], list[Row]], ...] = (
    _validation,
    _other_keys,
    _resumed,
    _epochs,
    _stacked,
    _interleaved,
    _shuffled,
    _counted_from_zero,
    _strided,
    _printed_twice,
    _rows_of_other_signals,
    *LAST,
)


def _refusal(file: Path) -> str | None:
    try:
        read_logs(file)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(300))
def test_a_random_layout_gives_the_true_series_or_is_refused(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    true = curve(int(rng.integers(120, 240)), seed)
    rows = rows_of(true)
    drawn = [LAYOUTS[i] for i in rng.choice(len(LAYOUTS), size=int(rng.integers(1, 4)), replace=False)]
    names = [layout.__name__ for layout in sorted(drawn, key=lambda layout: layout in LAST)]
    for layout in sorted(drawn, key=lambda layout: layout in LAST):
        if layout is not _without_steps or not NEED_STEPS & set(names):
            rows = layout(rng, rows)
    file = written(tmp_path, rows, as_csv=bool(rng.integers(2)))
    if len(names) > 1 and (refusal := _refusal(file)) is not None:
        assert "--" in refusal, names
        return
    logs = read_logs(file)
    assert true in [losses_of(log) for log in logs], (names, [len(log.log) for log in logs], logs[0].notes)


@pytest.mark.parametrize("seed", range(20))
def test_event_files_of_one_run_or_of_two(seed: int, tmp_path: Path) -> None:
    """Files of a folder, in the order of their times: of a run that was resumed, or of one that was begun anew."""
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    rng = np.random.default_rng(seed)
    true = curve(int(rng.integers(120, 240)), seed)
    rows, anew = rows_of(true), bool(seed % 2)
    cut = int(rng.integers(len(rows) // 3, len(rows) - 5))
    if anew:
        parts = [rows_of(curve(cut, seed=99)), rows]
    else:
        lost = [{**row, "loss": row["loss"] + 0.01} for row in rows[cut : cut + int(rng.integers(1, 30))]]
        parts = [rows[:cut] + lost, rows[cut:]]
    for i, part in enumerate(parts):
        with (tmp_path / f"events.out.tfevents.{1700000000 + i}.host").open("wb") as file:
            writer = record_writer.RecordWriter(file)
            writer.write(Event(file_version="brain.Event:2").SerializeToString())
            for row in part:
                values = [Summary.Value(tag="train/loss", simple_value=row["loss"])]
                writer.write(Event(step=row["step"], summary=Summary(value=values)).SerializeToString())
            writer.flush()
    logs = read_logs(tmp_path)
    assert len(logs) == 1 + anew
    assert losses_of(logs[-1]) == pytest.approx(true, abs=1e-6)
