"""Run directories are read as data, and a damaged one costs a sentence."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stability_lab.compare.run_record import find_runs
from stability_lab.config import ConfigError
from stability_lab.disk.lock import acquire


def test_runs_are_found_at_and_below_a_folder_once(make_run, tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(name)
    sweep = tmp_path / "sweep"
    runs, faults = find_runs([sweep, tmp_path, sweep / "a", Path(sweep / ".." / "sweep")])
    assert [run.name for run in runs] == ["a", "b"]
    assert faults == []


def test_copies_inside_a_run_are_no_runs(make_run, tmp_path: Path) -> None:
    folder = make_run("a")
    inner = folder / "wandb" / "files"
    inner.mkdir(parents=True)
    for name in ("config.yaml", "summary.json", "manifest.json"):
        (inner / name).write_bytes((folder / name).read_bytes())
    assert len(find_runs([tmp_path])[0]) == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("config.yaml", "a: [b"),
        ("config.yaml", "!!python/object/apply:os.system ['true']"),
        ("manifest.json", "3"),
        ("summary.json", "[" * 100_000),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_read(make_run, tmp_path: Path, file: str, content: str) -> None:
    make_run("good")
    (make_run("bad") / file).write_text(content, encoding="utf-8")
    runs, (fault,) = find_runs([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert "bad" in fault
    assert "\n" not in fault


@pytest.mark.parametrize("file", ["summary.json", "config.yaml", "manifest.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_what_is_no_file_hangs_nobody(make_run, tmp_path: Path, file: str, kind: str) -> None:
    make_run("good")
    path = make_run("bad") / file
    path.unlink(missing_ok=True)
    {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    runs, (fault,) = find_runs([tmp_path])
    assert [run.name for run in runs] == ["good"]
    assert fault.endswith(f"bad: its files cannot be read ({file}: it is a {kind} and no file)")


def test_where_nothing_can_be_read_the_first_fault_is_said(make_run, tmp_path: Path) -> None:
    (make_run("bad") / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no run here \(.*bad: its files cannot be read"):
        find_runs([tmp_path])


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), ("file", "is a file"), ("empty", "no run")])
def test_a_path_without_runs_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        find_runs([tmp_path / name])


def test_a_run_without_a_manifest_is_one(make_run, tmp_path: Path) -> None:
    (make_run("a", ["qknorm"], status="failed") / "manifest.json").unlink()
    ((run,), _) = find_runs([tmp_path])
    assert (run.status, run.stabilizers, run.lr) == ("failed", "qknorm", 3e-3)


def test_series_keep_nan_and_half_a_line_is_left_out(make_run, tmp_path: Path) -> None:
    folder = make_run("a")
    rows = [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": math.nan}, {"step": 3}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 4, "train/lo', encoding="utf-8")
    ((run,), _) = find_runs([tmp_path])
    series = run.series("step", "train/loss")
    np.testing.assert_array_equal(series["step"], [1, 2, 3])
    np.testing.assert_array_equal(series["train/loss"], [2.5, math.nan, math.nan])
    assert run.columns() == ["step", "train/loss"]


def test_a_value_that_is_no_number_is_none(make_run, tmp_path: Path) -> None:
    make_run("a", final={"val/loss": "many"}, clip_fraction=True)
    ((run,), _) = find_runs([tmp_path])
    assert run.metric("val/loss") is None
    assert run.metric("clip_fraction") is None
    assert run.metric("scores.loss.robust.n_spikes") == 2


def test_names_of_strangers_are_shown_without_control_characters(make_run, tmp_path: Path) -> None:
    make_run("a\x1b[31mred")
    assert find_runs([tmp_path])[0][0].name == "a\\x1b[31mred"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_a_run_that_died_by_a_signal_is_called_killed(make_run, run_command, tmp_path: Path, how: str) -> None:
    folder = make_run("a")
    (folder / "summary.json").write_text('{"status": "running"}', encoding="utf-8")
    assert find_runs([tmp_path])[0][0].status == "running"  # of a loop of one's own, which locks nothing
    script = (
        "import os, pathlib, signal, sys; from stability_lab.disk.lock import acquire\n"
        "lock = acquire(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.Signals[sys.argv[2]])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), how], timeout=60)
    assert done.returncode == -signal.Signals[how]
    assert find_runs([tmp_path])[0][0].status == "killed"
    shown = run_command("runs", str(tmp_path), "--status", "killed")
    assert shown.out.startswith("1 of 1 runs: 1 killed")
    lock = acquire(folder)  # it goes on
    assert find_runs([tmp_path])[0][0].status == "running"
    lock.release()
