"""Rows of a training log, whatever file they are in: the format is found by content, not by name."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stability_lab.config import ConfigError
from stability_lab.logs.cells import number
from stability_lab.logs.delimited import Row, read_table
from stability_lab.logs.tensorboard import is_event_file, read_scalars
from stability_lab.text import shown
from stability_lab.tracking.run_files import METRICS

# Logs that a folder may hold itself, the first of which is read.
_LOGS = (METRICS, "trainer_state.json", "metrics.csv")
TENSORBOARD_CHART = "CSV of a TensorBoard chart"
KNOWN = (
    "a run's folder, CSV, JSONL, trainer_state.json of transformers, Parquet, TensorBoard event files or an offline "
    ".wandb run"
)


@dataclass(frozen=True)
class Source:
    """Rows in the order of the log; a row lacks the columns that it has no value for.

    `run` names one of several runs in a file.
    """

    path: Path
    format: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    run: str | None = None
    _numbers: dict[Any, list[float | None]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    @property
    def name(self) -> str:
        return shown(self.path) if self.run is None else f"{shown(self.path)}, run {shown(self.run)}"

    def numbers(self, column: str, read: Callable[[Any], float | None] = number) -> list[float | None]:
        """The value of each row, as `read` reads its cell."""
        key = (column, read)
        if key not in self._numbers:
            self._numbers[key] = [read(row.get(column)) for row in self.rows]
        return self._numbers[key]


def read_sources(path: Path) -> list[Source]:
    """The log in a file or folder; of a folder that holds our own runs the log of each."""
    runs = []
    if path.is_dir() and not any((path / name).is_file() for name in _LOGS):
        runs = [file.parent for file in sorted(path.rglob(METRICS)) if run_folder(file)]
    return [read_source(run) for run in runs] if runs else [read_source(path)]


def read_source(path: Path) -> Source:
    """The log in a file or folder; ConfigError where it is missing, empty, damaged or of no known format."""
    try:
        files = _files(path)
        parts = [_read(file) for file in files]
    except OSError as error:
        raise ConfigError(f"{shown(path)}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = shown(str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
        raise ConfigError(f"{shown(path)} cannot be read: {reason}") from error
    notes = [note for part in parts for note in part.notes]
    if path.is_dir() and parts[0].format != "run folder":
        names = ", ".join(shown(file.relative_to(path)) for file in files[:3])
        notes.insert(0, f"Read from {names}" + (f" and {len(files) - 3} more." if len(files) > 3 else "."))
    source = Source(path, parts[0].format, [row for part in parts for row in part.rows], notes)
    if not source.rows:
        raise ConfigError(". ".join([f"{shown(path)} holds no row", *(shown(note.rstrip(".")) for note in notes)]))
    return source


def run_folder(path: Path) -> Path | None:
    """The folder of our own run that `path` is, or whose metrics.jsonl it is."""
    folder = path if path.is_dir() else path.parent
    own = (path.is_dir() or path.name == METRICS) and (folder / METRICS).is_file()
    return folder if own and (folder / "manifest.json").is_file() else None


def _files(path: Path) -> list[Path]:
    """The files to read, in order: the path itself, or what a folder holds."""
    if not path.exists():
        raise ConfigError(f"{shown(path)}: no such file or folder")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{shown(path)} is no regular file: write what it gives into one")
    for name in _LOGS:
        if (path / name).is_file():
            return [path / name]
    if states := sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime):
        return states[-1:]
    # The names of event files hold the time of their start: a resumed run has several.
    for pattern in ("*tfevents*", "*.wandb"):
        files = sorted(file for file in path.rglob(pattern) if file.is_file())
        folders = sorted({file.parent for file in files})
        if len(folders) > 1 and path not in folders:
            names = ", ".join(shown(folder) for folder in folders[:10])
            raise ConfigError(f"{shown(path)} holds {len(folders)} logs: give one of {names}")
        if files:
            return [file for file in files if path not in folders or file.parent == path]
    raise ConfigError(f"{shown(path)} holds no log: give {KNOWN}")


def _read(path: Path) -> Source:
    data = path.read_bytes()
    if not data.strip():
        raise ConfigError(f"{shown(path)} is empty")
    if data.startswith(b"PAR1"):
        return _parquet(path)
    if data.startswith(b":W&B"):
        from stability_lab.tracking.wandb.wandb_tracker import read_offline_run

        rows, notes = read_offline_run(path)
        return Source(path, "offline W&B run", [_flat(row) for row in rows], notes)
    if is_event_file(data):
        return Source(path, "TensorBoard events", *read_scalars(data))
    text = _text(data)
    if text is None:
        raise ConfigError(f"{shown(path)} is of no known format: give {KNOWN}")
    if text.lstrip()[0] in "{[":
        return _json(path, text)
    return _table(path, text)


def _text(data: bytes) -> str | None:
    """The text of a file; None where it is none."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    return text if text.strip() and "\0" not in text else None


def _table(path: Path, text: str) -> Source:
    rows, notes = read_table(text)
    if not rows or set(rows[0]) != {"Wall time", "Step", "Value"}:
        return Source(path, "CSV", rows, notes)
    # Its one series is named in the name that TensorBoard gives the file, `run-RUN-tag-TAG.csv`.
    tag = re.search(r"tag-(.+)", path.stem)
    if tag:
        rows = [{tag[1] if name == "Value" else name: cell for name, cell in row.items()} for row in rows]
    return Source(path, TENSORBOARD_CHART, rows, notes)


def _json(path: Path, text: str) -> Source:
    try:
        whole = json.loads(text)
    except ValueError:
        return _jsonl(path, text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        note = "transformers leaves NaN and infinite losses out of its log unless logging_nan_inf_filter=False."
        return Source(path, "trainer_state.json of transformers", _objects(whole["log_history"]), [note])
    return Source(path, _own(path, "JSON"), _objects(whole if isinstance(whole, list) else [whole]))


def _jsonl(path: Path, text: str) -> Source:
    objects, strange = [], []
    # Not splitlines: a string in JSON may hold U+2028 and its like.
    lines = text.split("\n")
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if isinstance(item, dict):
            objects.append(item)
        else:
            strange.append(at)
    if not objects:
        raise ConfigError(f"{shown(path)} is neither JSON nor one JSON object a line")
    notes = []
    if strange == [len(lines)]:
        notes.append("The last line is unfinished and left out.")
    elif strange:
        notes.append(f"{len(strange)} lines are no JSON objects and left out, the first is line {strange[0]}.")
    return Source(path, _own(path, "JSONL"), _objects(objects), notes)


def _own(path: Path, otherwise: str) -> str:
    return "run folder" if run_folder(path) else otherwise


def _objects(items: Iterable[Any]) -> list[Row]:
    return [_flat(item) for item in items if isinstance(item, dict)]


def _flat(item: dict[str, Any], prefix: str = "") -> Row:
    """Nested objects become columns `outer/inner`; what is missing (null) has no column."""
    row: Row = {}
    for key, value in item.items():
        if isinstance(value, dict):
            row |= _flat(value, f"{prefix}{key}/")
        elif value is not None:
            row[f"{prefix}{key}"] = value
    return row


def _parquet(path: Path) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        plain = [f.name for f in schema if not pa.types.is_nested(f.type) and not pa.types.is_binary(f.type)]
        table = file.read(columns=plain)
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    rows = [{name: cell for name, cell in row.items() if cell is not None} for row in table.to_pylist()]
    notes = []
    if b"pandas" in (schema.metadata or {}):
        notes.append("pandas wrote this file, and pandas writes NaN as a missing value.")
    return Source(path, "Parquet", rows, notes)
