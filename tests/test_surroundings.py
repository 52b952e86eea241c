"""What training needs of its surroundings: a folder to write to. Each run here is a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stability_lab import cli

pytestmark = pytest.mark.slow
# Neither of wandb's own servers can be reached from a closed port.
NOWHERE = "http://127.0.0.1:9"


def train(cwd: Path, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS", "STABILITY_LAB_CACHE") if key in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "stability_lab", "train", *words],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(Path(cli.__file__).parents[1]), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def words(tiny_overrides: tuple[str, ...]) -> list[str]:
    return [*tiny_overrides, "tracking=wandb"]


def check(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (path,) = folder.glob("outputs/runs/*")
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 5
    assert json.loads((path / "summary.json").read_text())["status"] == "completed"


def test_a_home_that_cannot_be_written_is_not_missed(tmp_path: Path, words: list[str]) -> None:
    """Below /dev/null no folder can be made, not even by root."""
    check(train(tmp_path, words, HOME="/dev/null/home"), tmp_path)


def test_nothing_is_written_outside_the_output_and_the_cache(tmp_path: Path, words: list[str]) -> None:
    home, scratch, work, cache = (tmp_path / name for name in ("home", "scratch", "work", "cache"))
    for folder in (home, scratch, work):
        folder.mkdir()
    environment = {"HOME": str(home), "TMPDIR": str(scratch), "STABILITY_LAB_CACHE": str(cache)}
    check(train(work, [*words, "tracking.mode=offline"], **environment), work)
    assert sorted(path.name for path in work.iterdir()) == ["outputs"]
    assert list(home.rglob("*")) == []
    assert list(scratch.rglob("*")) == []
    assert cache.is_dir()


def test_a_key_and_a_server_that_nobody_hears(tmp_path: Path, words: list[str]) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    done = train(tmp_path, words, HOME=str(tmp_path), WANDB_API_KEY=key, WANDB_BASE_URL=NOWHERE)
    check(done, tmp_path)
    assert done.stdout.lower().count("offline") >= 1
    written = (path for path in (tmp_path / "outputs").rglob("*") if path.is_file())
    assert [path for path in written if key.encode() in path.read_bytes()] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 64 KB, full at once."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_below_wandb_costs_a_warning(tmp_path: Path, words: list[str], small_disk: Path) -> None:
    """The run's folder of W&B stands on a disk of its own, which is full before the first step."""
    first = train(tmp_path, [*words, "tracking.mode=offline", "run_name=run"], HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    run = tmp_path / "outputs" / "runs" / "run"
    shutil.rmtree(run)
    run.mkdir()
    (run / "wandb").mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(run / "wandb")], check=True)
    with suppress(OSError):
        (small_disk / "filler").write_bytes(b"x" * 2**16)
    try:
        done = train(tmp_path, [*words, "tracking.mode=offline", "run_name=run"], HOME=str(tmp_path))
        (path,) = (path for path in run.parent.iterdir() if (path / "summary.json").exists())
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((path / "summary.json").read_text())["status"] == "completed"
    finally:
        subprocess.run(["umount", "-l", str(run / "wandb")], check=True)
