"""Scalars of a TensorBoard event file, as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stability_lab.config import ConfigError
from stability_lab.text import shown


def is_event_file(head: bytes) -> bool:
    """Every writer begins with an event that says the format's version."""
    return b"brain.Event:" in head[:64]


def read_scalars(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each run of events of the same step (`step` and the tags that it logged), and what is to be said.

    A last record that its writer did not finish is left out, and so are zeros at the end, which a file system leaves
    behind. ConfigError where the file is damaged before its end, or TensorBoard is missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ConfigError(
            f"{shown(path)} is an event file of TensorBoard, which is not installed: "
            "pip install 'stability-lab[tensorboard]'"
        ) from error
    reader = PyRecordReader_New(str(path).encode())
    rows: list[dict[str, Any]] = []
    end = 0  # of the last whole record
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return rows, []
        except DataLossError as error:
            return rows, [_damage(path, end, len(rows), "truncated" in str(error))]
        record = bytes(reader.record() or b"")
        end += len(record) + 16  # its length, and the checksums of both
        event = Event.FromString(record)
        for value in event.summary.value:
            cell = value.simple_value
            if value.HasField("tensor"):
                tensor = make_ndarray(value.tensor)
                if tensor.ndim or tensor.dtype.kind != "f":
                    continue
                cell = float(tensor)
            elif not value.HasField("simple_value"):
                continue
            if not rows or rows[-1]["step"] != event.step or value.tag in rows[-1]:
                rows.append({"step": event.step})
            rows[-1][value.tag] = cell


def _damage(path: Path, end: int, n_rows: int, cut: bool) -> str:
    """What is said of bytes after the last whole record; ConfigError where they are no end of a file."""
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read()
    if not any(rest):
        return f"The file ends in {len(rest):,} zero bytes: {n_rows:,} rows were read."
    if not cut:
        raise ConfigError(f"{shown(path)} cannot be read: it is damaged at byte {end:,}, after {n_rows:,} rows")
    return f"The file ends in the middle of a record, which is left out: {n_rows:,} rows were read."
