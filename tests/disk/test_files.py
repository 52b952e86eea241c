"""A file that is replaced whole, and what is opened as a file of a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from stability_lab.disk.files import open_file, other_kind, read_text, replace_file


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in ("été", b"\x00\xff"):
        replace_file(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    replace_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def put(kind: str, path: Path) -> None:
    """Something other than a file."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a socket", "a device"])
def test_what_is_no_file_is_refused_at_once(here: Path, kind: str) -> None:
    put(kind, here / "a")
    assert other_kind(here / "a") == kind
    for mode in ("r", "rb", "ab", "rb+"):
        with pytest.raises(OSError, match=f"it is {kind} and no file"):
            open_file(here / "a", mode)


def test_files_and_links_to_them_are_opened_as_by_open(here: Path) -> None:
    with open_file(here / "a", "ab") as file:
        file.write("été".encode())
    (here / "b").symlink_to("a")
    assert read_text(here / "b") == "été"
    assert other_kind(here / "b") is other_kind(here / "c") is None
    with pytest.raises(FileNotFoundError):
        read_text(here / "c")
