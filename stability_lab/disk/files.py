"""Files that are replaced whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
