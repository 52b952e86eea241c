"""A file's hash: whole where it is small, from head to tail where it is large."""

import hashlib
from pathlib import Path

import pytest

from stability_lab.data import content
from stability_lab.data.content import content_hash


def test_a_small_file_is_hashed_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"some text")
    assert content_hash(tmp_path / "x") == hashlib.sha256(b"some text").hexdigest()


def test_a_large_file_from_head_to_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE_BYTES", 100), ("SAMPLES", 5), ("SAMPLE_BYTES", 10)):
        monkeypatch.setattr(content, name, value)
    path, size = tmp_path / "x", 1010

    def changed_at(position: int) -> str:
        text = bytearray(size)
        text[position] = 1
        path.write_bytes(text)
        return content_hash(path)

    seen = [changed_at(position) for position in (0, 255, 500, 755, size - 1)]
    path.write_bytes(bytes(size))
    unseen = content_hash(path)
    path.write_bytes(bytes(size + 1))
    assert len({*seen, unseen, content_hash(path)}) == 7
    assert changed_at(100) == unseen  # what the docstring admits
