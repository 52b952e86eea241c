"""A disk that is full: one sentence, exit code 1, and metrics and the last good checkpoint as they were."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stability_lab.tracking.run_files import read_rows
from stability_lab.training.checkpoint import find_newest

RUN = (
    "run_name=a",
    "trainer.log_every=1",
    "trainer.max_steps=40",
    "trainer.checkpoint_every=2",
    "trainer.eval_every=null",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1.3 MB: enough for the run's first checkpoint (half a MB), not for a third beside two others."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk can be mounted by root only; the limit of a file's size is tested in any case")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def start(folder: Path, *words: str, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stability_lab", "train", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Logging error" not in done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("failed: "))
    assert sentence in line


@pytest.mark.slow
def test_the_disk_fills_up_while_checkpoints_are_written(small_disk: Path, tiny_overrides) -> None:
    done = start(small_disk, *tiny_overrides, *RUN)
    run = small_disk / "outputs" / "runs" / "a"
    assert_one_sentence(done, "could not be written: No space left on device")
    assert "to go on: python -m stability_lab train resume=outputs/runs/a" in done.stdout
    newest = find_newest(run / "checkpoints")
    assert newest.state is not None
    assert newest.damaged == {}
    step = newest.state.plain["step"]
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, step + 3))
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert "No space left on device" in summary["ended_by"]
    assert not (run / "checkpoints" / "last.new").exists()
    # With fewer checkpoints it goes on where it was.
    again = start(small_disk, "resume=outputs/runs/a", "trainer.keep_checkpoints=1", "trainer.checkpoint_every=null")
    assert f"the run goes on after step {step}" in again.stdout
    assert_one_sentence(again, "No space left on device")
    assert len(read_rows(run / "metrics.jsonl")) == 40
    assert find_newest(run / "checkpoints").state is not None


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start(small_disk: Path, tiny_overrides) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    done = start(small_disk, *tiny_overrides, *RUN)
    assert_one_sentence(done, "No space left on device")


@pytest.mark.slow
def test_a_file_may_not_grow_as_large_as_a_checkpoint(tmp_path: Path, tiny_overrides, run_command, monkeypatch) -> None:
    """The same without root: what the run goes on with cannot be written, and what it comes from stays."""
    monkeypatch.chdir(tmp_path)
    stopped = run_command("train", *tiny_overrides, *RUN, "debug.inject=raise@5")
    assert stopped.code == 1
    run = tmp_path / "outputs" / "runs" / "a"
    before = {path: path.read_bytes() for path in (run / "checkpoints" / "last").iterdir()}
    largest = max(len(content) for content in before.values())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))

    done = start(tmp_path, "resume=outputs/runs/a", limit=limit)
    assert_one_sentence(done, "failed: the checkpoint of step 6 could not be written: File too large")
    assert {path: path.read_bytes() for path in (run / "checkpoints" / "last").iterdir()} == before
    assert len(read_rows(run / "metrics.jsonl")) == 6
    assert run_command("train", "resume=outputs/runs/a").code == 0
    assert len(read_rows(run / "metrics.jsonl")) == 40


@pytest.mark.slow
def test_no_more_space_for_metrics(tmp_path: Path, tiny_overrides) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))

    done = start(tmp_path, *tiny_overrides, *RUN, "trainer.save_weights=false", limit=limit)
    assert_one_sentence(done, os.strerror(27))
    run = tmp_path / "outputs" / "runs" / "a"
    rows = read_rows(run / "metrics.jsonl")
    assert 5 < len(rows) < 40
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["status"] == "failed"
