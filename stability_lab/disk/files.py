"""Files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace `path`, text as UTF-8: a reader, or who comes after a full disk, sees the old content or the new one,
    never a part. OSError where that cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
