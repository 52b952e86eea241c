"""Files that are replaced whole, and the one way to open those of a run."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# Without it a FIFO waits for whoever is at its other end; Windows has neither.
_AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` at the end. OSError where that cannot be written.

    A reader finds the old content or the new one and never a part, also after a full disk or a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace `path`, text as UTF-8, in one piece (`replacing`)."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def other_kind(path: Path) -> str | None:
    """What stands at `path`, links followed, where it is no regular file: `a FIFO`; None for a file or for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except FileNotFoundError:
        return None


def open_file(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """`open` for regular files; OSError for anything else, which might keep its reader waiting for ever."""

    def opener(name: str, flags: int) -> int:
        if (kind := other_kind(path)) is not None:
            raise OSError(errno.EINVAL, f"it is {kind} and no file", name)
        return os.open(name, flags | _AT_ONCE, 0o666)

    return open(path, mode, opener=opener, **options)


def read_text(path: Path) -> str:
    """A regular file as UTF-8. OSError or UnicodeDecodeError."""
    with open_file(path, encoding="utf-8") as file:
        return file.read()


def why_unreadable(error: Exception) -> str:
    """What is wrong with a text, JSON or YAML file, in one line of our own words.

    `error` is what reading it raised: OSError, ValueError, RecursionError or yaml.YAMLError.
    """
    import yaml  # here, because most commands read JSON only

    match error:
        case OSError():
            return error.strerror or "the system refuses to read it"
        case UnicodeDecodeError():
            return f"byte {error.start} is not UTF-8"
        case json.JSONDecodeError():
            return f"line {error.lineno}, column {error.colno} is not JSON"
        case yaml.MarkedYAMLError(problem_mark=mark) if mark is not None:
            return f"line {mark.line + 1}, column {mark.column + 1} is not YAML of plain values"
        case RecursionError():
            return "it is nested too deeply"
    return "it holds characters or numbers that no such file can hold"
