"""The files of a run: `metrics.jsonl` and `events.jsonl` grow line by line, the others are replaced whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from stability_lab.disk.files import open_file, replace_file

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class RunFiles:
    """Writer of one run directory, which is created if it is missing.

    What was written survives the death of the process at any moment: a killed run loses at most the rows of
    the call it was in. Nothing is forced to the disk, so a power cut may cost more. A full disk raises
    `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._open: dict[str, int] = {}
        for name in (METRICS, EVENTS):
            (path / name).touch()

    def log_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append one line a row to `metrics.jsonl`; NaN and infinities are kept as `NaN` and `Infinity`."""
        self._append(METRICS, rows)

    def log_event(self, event: Mapping[str, Any]) -> None:
        """Append one line to `events.jsonl`."""
        self._append(EVENTS, [event])

    def sync(self) -> None:
        """Bring the rows and events so far to the disk, where a power cut does not reach them."""
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def set_aside(self, name: str, step: int) -> Path | None:
        """Move the lines of `name` after `step`, a torn one too, to a file beside it, and return that; None without.

        They are whole in the new file before they leave the old one.
        """
        assert name not in self._open
        with (self.path / name).open("rb+") as file:
            end = sum(length for _, length in _until(file, step))
            file.seek(end)
            rest = file.read()
            if not rest:
                return None
            aside, number = self.path / f"{name}.after-step-{step}-1", 1
            while aside.exists():
                number += 1
                aside = self.path / f"{name}.after-step-{step}-{number}"
            with aside.open("xb") as copy:
                copy.write(rest)
                copy.flush()
                os.fsync(copy.fileno())
            file.truncate(end)
        return aside

    def replace_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Put the events as they are known now in place of those noted on the way."""
        if EVENTS in self._open:  # of the file that is replaced
            os.close(self._open.pop(EVENTS))
        self.write_text(EVENTS, "".join(json.dumps(dict(event)) + "\n" for event in events))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace the file `name`; a reader sees the old content or the new one, never a part."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Replace the file `name`; a reader sees the old content or the new one, never a part."""
        replace_file(self.path / name, content)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        block = "".join(json.dumps(dict(row)) + "\n" for row in rows).encode()
        if not block:
            return
        if name not in self._open:
            path = self.path / name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._open[name] = descriptor
            _mend(path, descriptor)
        descriptor = self._open[name]
        size = os.fstat(descriptor).st_size
        try:
            while block:
                block = block[os.write(descriptor, block) :]
        except OSError:
            # What fitted on a full disk would stand in the middle of the file once there is space again.
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a `.jsonl` file; a last line that a killed writer left unfinished is skipped.

    Raises `ValueError` with file and line number where any other line is not a JSON object.
    """
    with open_file(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().split("\n")
    if not _is_row(lines[-1]):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        if not _is_row(line):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        rows.append(json.loads(line))
    return rows


def steps_until(path: Path, step: int) -> set[int]:
    """Steps up to `step` of the rows that `RunFiles.set_aside` leaves in a file; none where it is missing."""
    try:
        with open_file(path, "rb") as file:
            return {number for number, _ in _until(file, step)}
    except FileNotFoundError:
        return set()


def _until(file: IO[bytes], step: int) -> Iterator[tuple[int, int]]:
    """Step and length in bytes of the lines of a file before the first one that is of a later step or no row."""
    for line in file:
        number = (_row(line) or {}).get("step")
        if not isinstance(number, int) or number > step:
            return
        yield number, len(line)


def _row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_row(line: str | bytes) -> bool:
    return _row(line) is not None


def _mend(path: Path, descriptor: int) -> None:
    """Finish or remove the last line of a file that a killed writer left, before anything is appended."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    if _is_row(content[start:]):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, start)
