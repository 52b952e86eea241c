"""Scalars of a TensorBoard event file, read without TensorBoard.

The file is a sequence of TFRecords (length, checksum of the length, content, checksum of the content) that hold
`Event` messages of protocol buffers. Only the fields that a scalar needs are read. The content's checksum is checked
where the content is as short as that of scalars.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

# Field numbers of the messages Event, Summary, Summary.Value and TensorProto.
_STEP, _SUMMARY = 2, 5
_VALUE = 1
_TAG, _SIMPLE_VALUE, _TENSOR = 1, 2, 8
_SHAPE, _CONTENT = 2, 4
# How the one value of a tensor is stored, by the tensor's type (field 1): its own field and its `struct` format.
_NUMBERS = {1: (5, "<f"), 2: (6, "<d")}
_CHECKED = 1024  # bytes; longer contents are images, histograms and graphs


def is_event_file(data: bytes) -> bool:
    return len(data) >= 12 and _length(data, 0) is not None


class EventRecord(NamedTuple):
    at: int  # its first byte in the file
    content: bytes
    checksum: int


def read_scalars(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each run of events of the same step (`step` and the tags that it logged), and what is to be said.

    A last record that its writer did not finish is left out, and so are zeros at the end, which a file system leaves
    behind. Raises `ValueError` where the file is damaged before its end.
    """
    records, end = _records(data)
    rows: list[dict[str, Any]] = []
    damaged = _damaged(records)
    for record in records:
        try:
            step, scalars = _event(record.content)
        except (IndexError, struct.error):
            step, scalars, damaged = 0, [], min(record.at, damaged or record.at)
        if damaged is not None and record.at >= damaged:
            raise ValueError(f"it is damaged at byte {damaged:,}, after {len(rows):,} rows")
        for tag, value in scalars:
            if not rows or rows[-1]["step"] != step or tag in rows[-1]:
                rows.append({"step": step})
            rows[-1].setdefault(tag, value)
    rest = data[end:]
    if not rest:
        return rows, []
    if not any(rest):
        return rows, [f"The file ends in {len(rest):,} zero bytes: {len(rows):,} rows were read."]
    if len(rest) >= 12 and _length(data, end) is None:
        raise ValueError(f"it is damaged at byte {end:,}, after {len(rows):,} rows")
    return rows, [f"The file ends in the middle of a record, which is left out: {len(rows):,} rows were read."]


def _records(data: bytes) -> tuple[list[EventRecord], int]:
    """All whole records, and the byte after the last of them."""
    records, at = [], 0
    while at + 12 <= len(data):
        length = _length(data, at)
        if length is None or at + 12 + length + 4 > len(data):
            break
        end = at + 12 + length
        records.append(EventRecord(at, data[at + 12 : end], int.from_bytes(data[end : end + 4], "little")))
        at = end + 4
    return records, at


def _damaged(records: list[EventRecord]) -> int | None:
    """First byte of the first record whose content does not fit its checksum; None where all do."""
    groups: dict[int, list[EventRecord]] = defaultdict(list)
    for record in records:
        if len(record.content) <= _CHECKED:
            groups[len(record.content)].append(record)
    bad = []
    for length, group in groups.items():
        # All records of one length at once, a byte at a time.
        content = np.frombuffer(b"".join(r.content for r in group), dtype=np.uint8).reshape(len(group), length)
        crc = np.full(len(group), 0xFFFFFFFF, dtype=np.uint32)
        for column in content.T:
            crc = _CRC_ARRAY[(crc ^ column) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
        wrong = np.flatnonzero(masked != np.array([r.checksum for r in group], dtype=np.uint32))
        bad += [group[int(wrong[0])].at] if wrong.size else []
    return min(bad, default=None)


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
_CRC_ARRAY = np.array(_CRC, dtype=np.uint32)


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
