"""Many files at once: those that cannot be used are named together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from stability_lab.config import ConfigError

NAMED = 5
T = TypeVar("T")


def checked_each(paths: Sequence[Path], check: Callable[[Path], T]) -> list[T]:
    """`check` of every path; ConfigError has the sentence of the first that is refused, and the names of all."""
    found, bad = [], []
    for path in paths:
        try:
            found.append(check(path))
        except ConfigError as error:
            bad.append((path, error))
    if not bad:
        return found
    first = bad[0][1]
    if len(bad) == 1:
        raise first
    names = ", ".join(path.name for path, _ in bad[:NAMED])
    more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
    raise ConfigError(f"{first} ({len(bad):,} of {len(paths):,} files are refused: {names}{more})") from first
