"""Rows of a training log, whatever file they are in: the format is found by content, not by name."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.logs.cells import NOTHING, flag, step_number
from stability_lab.logs.delimited import names_of, read_table
from stability_lab.logs.printed import PRINTED, printed_rows, recognised
from stability_lab.logs.tensorboard import is_event_file, read_scalars
from stability_lab.text import flatten, number, shown
from stability_lab.tracking.run_files import METRICS

# Logs that a folder may hold itself, the first of which is read.
_LOGS = (METRICS, "trainer_state.json", "metrics.csv")
_HEAD = 1 << 16  # bytes by which a format is known
_CHUNK = 50_000  # rows that are in memory as objects
_BEGIN = 60  # characters that are shown of a file that is none of these
_MOST = 100_000  # files and folders below a folder in which logs are looked for
_READ: Mapping[str, Callable[[Any], float | None]] = {"step": step_number, "skipped": flag}
_RUNS_OF_WANDB = {"Name", "State", "Created", "Runtime"}
TRAINER_STATE = "trainer_state.json of transformers"
TENSORBOARD_CHART = "CSV of a TensorBoard chart"
KNOWN = (
    "a run's folder, CSV, JSONL, a printed log (nanoGPT, llm.c, modded-nanogpt, Megatron, torchtitan, OLMo, fairseq, "
    "transformers, Lightning, Composer, LitGPT, OpenMMLab, Keras, or lines such as 'step 10: loss 2.5, lr 0.001'), "
    "trainer_state.json of transformers, Parquet, TensorBoard event files or an offline .wandb run"
)


class Numbers(NamedTuple):
    """Shape (rows,): the values of a column, and which rows have one; a NaN that was logged is a value."""

    value: NDArray[np.float64]
    known: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Source:
    """A log as a table, with its rows in their order.

    A cell of the table is missing where the row has no value; a NaN that was logged is the word `NaN`. `run` names one
    of several runs in a file.
    """

    path: Path
    format: str
    table: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    run: str | None = None
    _numbers: dict[Any, Numbers] = field(default_factory=dict, init=False, repr=False)

    @property
    def columns(self) -> list[str]:
        return list(self.table.columns)

    @property
    def name(self) -> str:
        return shown(self.path) if self.run is None else f"{shown(self.path)}, run {shown(self.run)}"

    @property
    def apart(self) -> str:
        """What tells rows that do not belong together apart."""
        if self.format in PRINTED:
            return "give a file with the lines of one run, and of one rank, alone"
        return "--runs-by COLUMN or --split WORD says which belong together, or take those out that do not count"

    def cells(self, column: str) -> pd.Series:
        return cast("pd.Series", self.table[column])

    def numbers(self, column: str, role: str = "") -> Numbers:
        """What a column says, read as its role asks: only steps may have thousands, none is NaN or infinite."""
        read = _READ.get(role, number)
        if (column, read) not in self._numbers:
            value, known = _numbers(self.cells(column), read)
            # No row is at step NaN; as a loss that was logged it is a value.
            self._numbers[column, read] = Numbers(value, known & np.isfinite(value) if role == "step" else known)
        return self._numbers[column, read]


def _numbers(cells: pd.Series, read: Callable[[Any], float | None]) -> Numbers:
    """By pandas where all cells are numbers, else word by word."""
    if pd.api.types.is_numeric_dtype(cells) and not pd.api.types.is_bool_dtype(cells):
        values = cells.to_numpy(np.float64, na_value=np.nan)
        return Numbers(values, ~np.isnan(values))
    there = cells.notna().to_numpy()
    found = [read(cell) if has else None for cell, has in zip(cells, there, strict=True)]
    known = np.array([value is not None for value in found], dtype=np.bool_)
    return Numbers(np.array([np.nan if value is None else value for value in found], dtype=np.float64), known)


def logs_in(path: Path) -> list[Path]:
    """The path itself, or the folders of our own runs below it; ConfigError where it holds too much to look through."""
    if not path.is_dir() or any((path / name).is_file() for name in _LOGS):
        return [path]
    runs = [file.parent for file in _files_below(path) if file.name == METRICS and run_folder(file)]
    return runs or [path]


def _files_below(path: Path) -> list[Path]:
    """All files below a folder, sorted; ConfigError where they are more than those of any sweep."""
    found: list[Path] = []
    many = 0
    for folder, folders, files in os.walk(path):
        many += len(folders) + len(files)
        if many > _MOST:
            raise ConfigError(
                f"{shown(path)} holds more than {_MOST:,} files and folders: give the folder of a run or of a sweep"
            )
        found += [Path(folder, name) for name in files]
    return sorted(found)


def read_source(path: Path) -> Source:
    """The log in a file or folder; ConfigError where it is missing, empty, damaged or of no known format."""
    try:
        files = _files(path)
        parts = [_read(file) for file in files]
    except OSError as error:
        raise ConfigError(f"{shown(path)}: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{shown(path)} cannot be read: its JSON is nested too deeply") from error
    notes = [note for part in parts for note in part.notes]
    if path.is_dir() and parts[0].format != "run folder":
        names = ", ".join(shown(file.relative_to(path)) for file in files[:3])
        notes.insert(0, f"Read from {names}" + (f" and {len(files) - 3} more." if len(files) > 3 else "."))
    table = parts[0].table if len(parts) == 1 else pd.concat([part.table for part in parts], ignore_index=True)
    if table.empty:
        raise ConfigError(". ".join([f"{shown(path)} holds no row", *(shown(note.rstrip(".")) for note in notes)]))
    return Source(path, parts[0].format, table, notes)


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
    if states := sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step):
        return states[-1:]
    below = _files_below(path)
    # The names of event files hold the time of their start: a resumed run has several.
    for is_log in (lambda name: "tfevents" in name, lambda name: name.endswith(".wandb")):
        files = [file for file in below if is_log(file.name) and file.is_file()]
        folders = sorted({file.parent for file in files})
        if len(folders) > 1 and path not in folders:
            names = ", ".join(shown(folder) for folder in folders[:10])
            raise ConfigError(f"{shown(path)} holds {len(folders)} logs: give one of {names}")
        if files:
            return [file for file in files if path not in folders or file.parent == path]
    raise ConfigError(f"{shown(path)} holds no log: give {KNOWN}")


def _checkpoint_step(state: Path) -> int:
    """The number in a checkpoint's name: a clone or copy gives all of them the same time."""
    number = state.parent.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _read(path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.strip():
        raise ConfigError(f"{shown(path)} is empty")
    if head.startswith(b"PAR1"):
        return Source(path, "Parquet", *_parquet(path))
    if head.startswith(b":W&B"):
        from stability_lab.tracking.wandb.wandb_tracker import read_offline_run

        try:
            rows, notes = read_offline_run(path)
        except ValueError as error:
            raise ConfigError(f"{shown(path)} cannot be read: {shown(error)}") from error
        return Source(path, "offline W&B run", _table(rows), notes)
    if is_event_file(head):
        rows, notes = read_scalars(path)
        return Source(path, "TensorBoard events", _table(rows), notes)
    encoding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    text = head.decode(encoding, errors="replace").strip()
    if not text or "\0" in text:
        raise ConfigError(f"{shown(path)} is of no known format: give {KNOWN}")
    if text.startswith("version https://git-lfs"):
        raise ConfigError(f"{shown(path)} is a pointer of Git LFS and not the file itself: fetch it with git lfs pull")
    if text[0] in "{[" and _is_json(text):
        return _json(path, encoding)
    if (kind := recognised(path, encoding)) is not None:
        notes = [] if kind.note is None else [kind.note]
        return Source(path, kind.name, _table(printed_rows(path, encoding, kind)), notes)
    if text[0] in "{[" or (read := read_table(path, encoding)) is None:
        begin = text.splitlines()[0][:_BEGIN]
        raise ConfigError(
            f"{shown(path)} is no table and no printed log of a known form, it begins '{shown(begin)}', and no line "
            f"names a step and a loss that can be read: give {KNOWN}"
        )
    return _chart(path, *read)


def _is_json(text: str) -> bool:
    """Whether the first line, or all of it, is JSON."""
    try:
        json.loads(text.splitlines()[0])
    except ValueError:
        return not re.match(r"\{'|\[\w", text)
    return True


def _chart(path: Path, table: pd.DataFrame, notes: list[str]) -> Source:
    if _RUNS_OF_WANDB.issubset(table.columns):
        raise ConfigError(
            f"{shown(path)} is the table of runs of a W&B project, one row a run, and no history: export a chart or "
            "give the run's folder"
        )
    if set(table.columns) != {"Wall time", "Step", "Value"}:
        return Source(path, "CSV", table, notes)
    # Its one series is named in the name that TensorBoard gives the file, `run-RUN-tag-TAG.csv`.
    tag = re.search(r"tag-(.+)", path.stem)
    return Source(path, TENSORBOARD_CHART, table.rename(columns={"Value": tag[1]}) if tag else table, notes)


def _json(path: Path, encoding: str) -> Source:
    try:
        whole = json.loads(path.read_text(encoding, errors="replace"))
    except ValueError:
        return Source(path, _own(path, "JSONL"), *_json_lines(path, encoding))
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        note = "transformers leaves NaN and infinite losses out of its log unless logging_nan_inf_filter=False."
        return Source(path, TRAINER_STATE, _table(whole["log_history"]), [note])
    if isinstance(whole, dict) and (columns := _by_column(whole)) is not None:
        return Source(path, "JSON by column", *columns)
    if isinstance(whole, list) and whole and all(isinstance(row, list) for row in whole):
        names, note = names_of(list(map(str, whole[0])))
        return Source(path, "JSON", _table(dict(zip(names, row, strict=False)) for row in whole), [note])
    return Source(path, _own(path, "JSON"), _table(whole if isinstance(whole, list) else [whole]))


def _by_column(whole: dict[str, Any]) -> tuple[pd.DataFrame, list[str]] | None:
    """A table of lists of one length, or of values by their step: dumps of pandas, golden values of Megatron."""
    if whole and all(isinstance(value, list) for value in whole.values()):
        if len({len(value) for value in whole.values()}) > 1:
            return None
        rows = zip(*whole.values(), strict=True)
        return _table(dict(zip(whole, cells, strict=True)) for cells in rows), []
    values = {k: v.get("values", v) if isinstance(v, dict) else None for k, v in whole.items()}
    if not values or not all(isinstance(v, dict) and v and all(map(str.isdigit, v)) for v in values.values()):
        return None
    steps = sorted({int(step) for column in values.values() for step in column or ()})
    named = {name: column for name, column in values.items() if column}
    table = _table({"step": step} | {k: v[str(step)] for k, v in named.items() if str(step) in v} for step in steps)
    # Golden values go on to the last step that was planned. No divergence makes a time or a size of memory NaN.
    machine = [name for name in named if re.search("mem|time", name)]
    ran = np.any([table[name].map(lambda cell: str(cell).lower() != "nan") for name in machine], axis=0)
    end = int(np.flatnonzero(ran).max(initial=-1)) + 1 if machine else len(table)
    note = (
        f"The last {len(table) - end:,} rows are left out: {' and '.join(machine)} say that these steps were not run."
    )
    return table.iloc[:end], [note] if end < len(table) else []


def _json_lines(path: Path, encoding: str) -> tuple[pd.DataFrame, list[str]]:
    strange: list[tuple[int, bool]] = []  # the line's number, and whether it has an end

    def objects() -> Iterator[dict[str, Any]]:
        # Not any other line break: a string in JSON may hold U+2028 and its like.
        with path.open(encoding=encoding, errors="replace", newline="\n") as lines:
            for at, line in enumerate(lines, start=1):
                try:
                    item = json.loads(line)
                except ValueError:
                    item = None
                if isinstance(item, dict):
                    yield item
                elif line.strip():
                    strange.append((at, line.endswith("\n")))

    table = _table(objects())
    if not len(table):
        raise ConfigError(f"{shown(path)} is neither JSON nor one JSON object a line")
    if [ended for _, ended in strange] == [False]:
        return table, ["The last line is unfinished and left out."]
    if strange:
        return table, [f"{len(strange)} lines are no JSON objects and left out, the first is line {strange[0][0]}."]
    return table, []


def _own(path: Path, otherwise: str) -> str:
    return "run folder" if run_folder(path) else otherwise


def _table(items: Iterable[Any]) -> pd.DataFrame:
    """A row for each of `items` that is an object; nested ones become columns `outer/inner`."""
    rows = (_row(item) for item in items if isinstance(item, dict))
    parts = [pd.DataFrame(part) for part in iter(lambda: list(islice(rows, _CHUNK)), [])]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without null and its like, and with NaN as a word, since pandas takes one for the other."""
    cells = ((key, value) for key, value in flatten(item, "/").items() if value is not None)
    return {k: "NaN" if v != v else v for k, v in cells if not (isinstance(v, str) and v.strip() in NOTHING)}


def _parquet(path: Path) -> tuple[pd.DataFrame, list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        plain = [f.name for f in schema if not pa.types.is_nested(f.type) and not pa.types.is_binary(f.type)]
        read = file.read(columns=plain)
    except pa.ArrowException as error:
        raise ConfigError(f"{shown(path)} cannot be read: it is a damaged or unfinished Parquet file") from error
    table = read.to_pandas(ignore_metadata=True)
    for name in plain:
        if pa.types.is_floating(read[name].type):
            logged = table[name].isna() & read[name].is_valid().to_pandas()
            if logged.any():
                table[name] = table[name].astype(object).mask(logged, "NaN")
    notes = []
    if b"pandas" in (schema.metadata or {}):
        notes.append("pandas wrote this file, and pandas writes NaN as a missing value.")
    return table, notes
