"""One process at a time in a run's folder, and none for ever."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stability_lab.disk.lock import LOCK, Held, abandoned, acquire


def test_the_holder_is_named_and_the_file_goes_with_the_lock(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    with pytest.raises(Held, match=f"process {os.getpid()} on {socket.gethostname()}, since 20"):
        acquire(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text(encoding="utf-8"))["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    lock.release()
    acquire(tmp_path).release()


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time; from stability_lab.disk.lock import acquire\n"
        "lock = acquire(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Held, match=f"process {holder.pid} on "):
            acquire(tmp_path)
        assert not abandoned(tmp_path)
        holder.kill()
    assert (tmp_path / LOCK).exists()
    assert abandoned(tmp_path)
    assert abandoned(tmp_path)
    acquire(tmp_path).release()


def test_a_lock_whose_file_was_removed_in_the_meantime_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder leaves between our opening of its file and our locking of it."""
    calls, flock = [], fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = acquire(tmp_path)
    assert len(calls) == 2
    with pytest.raises(Held):
        acquire(tmp_path)
    lock.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious", encoding="utf-8")
    (tmp_path / LOCK).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        acquire(tmp_path)
    assert (tmp_path / "outside").read_text(encoding="utf-8") == "precious"


def test_words_of_a_holder_cannot_steer_the_terminal(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    for content, shown in (
        (json.dumps({"pid": 7, "host": "\x1b[2Jhost", "since": "now"}), "process 7 on ?[2Jhost, since now"),
        ("no JSON", "another process"),
    ):
        (tmp_path / LOCK).write_text(content, encoding="utf-8")
        with pytest.raises(Held) as held:
            acquire(tmp_path)
        assert str(held.value) == shown
    lock.release()


@pytest.mark.parametrize("content", ['{"pid": 7, "host": "another", "since": "now"}', "", "[]", None])
def test_a_lock_of_another_machine_or_of_nobody_is_not_called_abandoned(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / LOCK).write_text(content, encoding="utf-8")
    assert not abandoned(tmp_path)
