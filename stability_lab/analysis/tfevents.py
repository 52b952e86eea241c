"""Scalars of a TensorBoard event file, read without TensorBoard.

The file is a sequence of TFRecords (length, checksum of the length, content, checksum of the content) that hold
`Event` messages of protocol buffers. Only the fields that a scalar needs are read, and the content's checksum is not
checked: in pure Python that would take longer than everything else together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# Field numbers of the messages Event, Summary, Summary.Value and TensorProto.
_STEP, _SUMMARY = 2, 5
_VALUE = 1
_TAG, _SIMPLE_VALUE, _TENSOR = 1, 2, 8
_SHAPE, _CONTENT = 2, 4
# How the one value of a tensor is stored, by the tensor's type (field 1): its own field and its `struct` format.
_NUMBERS = {1: (5, "<f"), 2: (6, "<d")}


def is_event_file(data: bytes) -> bool:
    return len(data) >= 12 and _length(data, 0) is not None


def read_scalars(data: bytes) -> list[dict[str, Any]]:
    """One row for each run of events of the same step: `step` and the tags that it logged.

    A last record that its writer did not finish is left out. Raises `ValueError` where the file is damaged.
    """
    rows: list[dict[str, Any]] = []
    for record in _records(data):
        try:
            step, scalars = _event(record)
        except (IndexError, struct.error) as error:
            raise ValueError("an event in it is damaged") from error
        for tag, value in scalars:
            if not rows or rows[-1]["step"] != step or tag in rows[-1]:
                rows.append({"step": step})
            rows[-1].setdefault(tag, value)
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(data):
        length = _length(data, at)
        if length is None:
            raise ValueError(f"it is damaged at byte {at}")
        end = at + 12 + length
        if end + 4 > len(data):
            return
        yield data[at + 12 : end]
        at = end + 4


def _length(data: bytes, at: int) -> int | None:
    """Length of the record at `at`; None where its checksum does not fit."""
    length, checksum = struct.unpack_from("<QI", data, at)
    crc = 0xFFFFFFFF
    for byte in data[at : at + 8]:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return length if masked == checksum else None


def _castagnoli(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = [_castagnoli(byte) for byte in range(256)]


def _event(record: bytes) -> tuple[int, list[tuple[str, float]]]:
    step, scalars = 0, []
    for field, content in _fields(record):
        if field == _STEP and isinstance(content, int):
            step = content - (1 << 64) if content >> 63 else content
        elif field == _SUMMARY and isinstance(content, bytes):
            values = (value for number, value in _fields(content) if number == _VALUE and isinstance(value, bytes))
            scalars += [scalar for value in values if (scalar := _scalar(value)) is not None]
    return step, scalars


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, content in _fields(value):
        if not isinstance(content, bytes):
            continue
        if field == _TAG:
            tag = content.decode("utf-8", errors="replace")
        elif field == _SIMPLE_VALUE:
            (number,) = struct.unpack("<f", content)
        elif field == _TENSOR:
            number = _only_number(content)
    return None if number is None else (tag, number)


def _only_number(tensor: bytes) -> float | None:
    """The value of a float32 or float64 tensor without dimensions; None for any other, such as a histogram."""
    fields = dict(_fields(tensor))
    if fields.get(_SHAPE) or fields.get(1) not in _NUMBERS:
        return None
    field, kind = _NUMBERS[fields[1]]  # pyright: ignore[reportArgumentType]
    content = fields.get(field, fields.get(_CONTENT))
    return struct.unpack(kind, content)[0] if isinstance(content, bytes) else 0.0


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of each field of a message; IndexError or struct.error where it breaks off."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            content, at = _varint(message, at)
            yield key >> 3, content
            continue
        if key & 7 == 2:
            size, at = _varint(message, at)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise IndexError("a field of no known kind")
        if at + size > len(message):
            raise IndexError("a field is longer than its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError("a number is too long")
