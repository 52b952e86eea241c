"""Documents out of text files: plain, JSON lines, JSON lists, CSV and Parquet, all but the last also gzipped.

Everything is read in order and piece by piece. Only a single document, or a JSON list, has to fit into memory, and a
large plain file not even that: it is mapped and cut. The name says whether a file has rows, and files whose content is
something else are refused ([content.py](../../disk/content.py)).
"""

from __future__ import annotations

import csv
import functools
import glob
import gzip
import io
import itertools
import json
import logging
import mmap
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stability_lab.config import ConfigError
from stability_lab.data.bad_files import checked_each
from stability_lab.data.source import Document
from stability_lab.disk.content import HEAD, is_utf8, kind_of

PIECE_BYTES = 16 * 1024
"""Aimed-at size of a piece where a few long files stand in for documents."""
LINES, LIST, TABLES, PARQUET = (".jsonl", ".ndjson"), ".json", (".csv", ".tsv"), ".parquet"
SUFFIXES = (".txt", *LINES, PARQUET)
GIANT = 0.25
"""A document of a larger share of the text does not go to validation whole."""
NULS = 0.01
"""A file with a larger share of these is no text."""
Paths = list[tuple[str, Path]]

logger = logging.getLogger("stability_lab")


def text_paths(pattern: str) -> Paths:
    """(name, path) of a file, of a folder's text files or of what a glob matches, sorted by name.

    A folder's JSON lists and tables count only where it has no other text: beside text they may well be about it.
    Names are relative to the files' common folder: moving the data leaves them as they are.
    """
    path = Path(os.path.expanduser(pattern))
    if os.path.isfile(path):  # unlike the methods of Path it never raises
        paths = [path]
    elif os.path.isdir(path):
        files = [p for p in path.rglob("*") if p.is_file()]
        paths = [p for p in files if _kind(p) in SUFFIXES] or [p for p in files if _kind(p) in (LIST, *TABLES)]
        if not paths:
            raise ConfigError(
                f"data.path={pattern}: the folder holds no .txt file, nor .jsonl, .json, .csv or .parquet."
            )
    elif glob.has_magic(pattern):
        paths = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not paths:
            raise ConfigError(f"data.path={pattern}: no file matches this pattern (from {Path.cwd()}).")
    else:
        raise ConfigError(
            f"data.path={pattern}: no such file or folder (from {Path.cwd()}); "
            "give a text file, a folder of .txt, .jsonl, .json, .csv or .parquet files, or a glob pattern."
        )
    paths = [p.absolute() for p in paths]
    root = os.path.commonpath([p.parent for p in paths])
    return sorted((p.relative_to(root).as_posix(), p) for p in paths)


def read_documents(paths: Paths, field: str) -> Iterator[Document]:
    """A plain file is one document; a line of JSON or a row of Parquet is one, with its text under `field`.

    A row in which that is null is left out.
    """
    for name, path in paths:
        if _has_rows(path):
            yield from ((f"{name}#{number:09d}", text) for number, text in _reader(path)(path, field))
        else:
            with _opened(path) as file:
                text = file.read()
            _check_utf8(text, path)
            yield name, text


def read_pieces(paths: Paths, field: str, at_least: int) -> Iterator[Document]:
    """The same text as pieces of about 16 KiB, or smaller ones so that there are some `at_least`.

    Pieces end after a newline, else after a space, else after a character.
    """
    size = _piece_bytes(text_bytes(paths, field), at_least)
    for name, path in paths:
        whole = _mapped(name, path) if _is_plain(path) else read_documents([(name, path)], field)
        for document, text in whole:
            pieces = _cut_at_newlines(text, size, path)
            yield from ((f"{document}#{i:06d}", piece) for i, piece in enumerate(pieces))


def fewer_documents_than(paths: Paths, field: str, n: int) -> bool:
    """Whether `paths` hold fewer than `n` documents. Plain files are not read, and of others only the first rows."""
    rows = read_documents([(name, path) for name, path in paths if _has_rows(path)], field)
    missing = n - sum(not _has_rows(path) for _, path in paths)
    return len(list(itertools.islice(rows, max(missing, 0)))) < missing


def cut_giants(
    documents: Iterable[Document], total: int, val_every: int, holds_out: Callable[[int], bool]
) -> Iterator[Document]:
    """The same documents of `total` bytes, but a giant that would be held out whole as pieces, each a document.

    A giant is more than a quarter of the text, and more than 1.5 times what validation should have.
    """
    limit, size, number = total * max(GIANT, 1.5 / val_every), _piece_bytes(total, val_every), 0
    for name, text in documents:
        if len(text) <= limit or not holds_out(number):
            yield name, text
            number += 1
            continue
        share = f"{name} is {len(text) / total:.0%} of the text"
        _tell(f"{share}: it is cut into pieces, of which every {val_every}th is held out for validation")
        for i, piece in enumerate(_cut_at_newlines(text, size, Path(name))):
            yield f"{name}#{i:06d}", piece
            number += 1


@functools.cache  # a command reads its text more than once
def _tell(notice: str) -> None:
    logger.warning(notice)


def _piece_bytes(total: int, at_least: int) -> int:
    return min(PIECE_BYTES, max(1, total // at_least))


def check_contents(paths: Paths, field: str) -> None:
    """ConfigError with the names of all files whose beginning is not what they are to be read as."""
    checked_each([path for _, path in paths], lambda path: _check_content(path, field))


def _check_content(path: Path, field: str) -> None:
    with _opened(path) as file:
        head, size = file.read(HEAD), path.stat().st_size
    kind = kind_of(head, size)
    if kind is not None and not (kind.name == "parquet" and _kind(path) == PARQUET):
        raise ConfigError(f"data.path: {path} {kind.what}: {kind.todo or 'give text'}")
    if _has_rows(path):
        if _kind(path) == LIST and not head.lstrip().startswith(b"[") and not _are_objects(head, 1):
            raise ConfigError(f"data.path: {path} is neither a JSON list of objects nor JSON lines; write one of these")
        return
    if head.count(0) > NULS * len(head) and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"data.path: {path} is no text but binary; files of token ids are for data=tokens")
    if _looks_like_rows(head):
        raise ConfigError(
            f"data.path: {path} holds JSON under the name of plain text; give it a name that ends in "
            f"{LIST if head.lstrip().startswith(b'[') else LINES[0]}, so that data.field={field} is read"
        )


def _looks_like_rows(head: bytes) -> bool:
    """Whether text is a JSON list of objects, or its first two lines are objects with the same keys."""
    return re.match(rb'\s*\[\s*\{\s*"', head) is not None or _are_objects(head, 2)


def _are_objects(head: bytes, n: int) -> bool:
    """Whether the first `n` lines are objects of JSON with the same keys, or the one is too long to be seen whole."""
    head = head.lstrip() + (b"\n" if len(head) < HEAD else b"")
    *lines, _ = head.split(b"\n", n)
    if n == 1 and not lines:
        return head.startswith(b"{")
    try:
        rows = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return False
    return len(rows) == n and all(row and isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows)


def is_text(path: Path) -> bool:
    """Whether a file is text by its name or, as far as its first 64 KiB show, by its content."""
    with _opened(path) as file:
        return is_utf8(file.read(HEAD)) or _has_rows(path)


def utf8_error(text: bytes) -> int | None:
    """Offset of the first byte that is not UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _kind(path: Path) -> str:
    """The suffix that counts, in small letters: that before .gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _has_rows(path: Path) -> bool:
    return _kind(path) in (*LINES, LIST, *TABLES, PARQUET)


def _reader(path: Path) -> Callable[[Path, str], Iterator[tuple[int, bytes]]]:
    if _kind(path) == PARQUET:
        return _parquet_rows
    if _kind(path) in TABLES:
        return _table_rows
    return _json_list if _kind(path) == LIST and _is_list(path) else _json_lines


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file for reading, through gzip if its content is that."""
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if gzipped else file  # pyright: ignore[reportReturnType]
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"data.path: {path} cannot be read ({reason}); give a file that can.") from error


def _is_plain(path: Path) -> bool:
    if _has_rows(path):
        return False
    with _opened(path) as file:
        return not isinstance(file, gzip.GzipFile)


def _mapped(name: str, path: Path) -> Iterator[tuple[str, mmap.mmap]]:
    if path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            yield name, text


def text_bytes(paths: Paths, field: str) -> int:
    """Bytes of the documents. Plain files are not read."""
    plain = sum(path.stat().st_size for _, path in paths if _is_plain(path))
    others = read_documents([(name, path) for name, path in paths if not _is_plain(path)], field)
    return plain + sum(len(text) for _, text in others)


def _json_lines(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """(line, text), counted from 1."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"data.path: {path}, line {number} is not JSON ({error}).") from error
            text = _text_of(row, field, f"{path}, line {number}")
            if text is not None:
                yield number, text


def _is_list(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(HEAD).lstrip().startswith(b"[")


def _json_list(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """(item, text), counted from 1."""
    try:
        with _opened(path) as file:
            rows = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data.path: {path} is not JSON ({error}).") from error
    for number, row in enumerate(rows, start=1):
        text = _text_of(row, field, f"{path}, item {number}")
        if text is not None:
            yield number, text


def _text_of(row: Any, field: str, place: str) -> bytes | None:
    """The text of an object in JSON, None where it is null."""
    text = row.get(field, False) if isinstance(row, dict) else False
    if isinstance(text, str):
        return text.encode(errors="replace")  # JSON can spell half of a surrogate pair, which no UTF-8 is
    if text is None:
        return None
    keys = ", ".join(map(str, row)) if isinstance(row, dict) else "no object"
    raise ConfigError(
        f"data.field={field}: {place} has no text under it (it has {keys}); name the field that holds the text."
    )


def _table_rows(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """(row, text), counted from 1, of a table with a header. Cells in quotes may have line breaks."""
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        try:
            table = csv.DictReader(lines, delimiter="\t" if _kind(path) == ".tsv" else ",", strict=True)
            for number, row in enumerate(table, start=1):
                text = row.get(field)
                if text is None:
                    columns = ", ".join(table.fieldnames or ())
                    raise ConfigError(
                        f"data.field={field}: {path}, row {number} has no such cell (the columns are {columns}); name "
                        "the column that holds the text."
                    )
                yield number, text.encode()
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"data.path: {path} is no sound table in UTF-8 ({error}).") from error


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """(row, text), counted from 1."""
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            if field not in columns.names or str(columns.field(field).type) not in ("string", "large_string"):
                raise ConfigError(
                    f"data.field={field}: {path} has no column of text of that name (it has "
                    f"{', '.join(columns.names)}); name the column that holds the text."
                )
            batches = file.iter_batches(batch_size=1024, columns=[field])
            texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            yield from ((number, text.encode()) for number, text in enumerate(texts, start=1) if text is not None)
    except (ArrowException, OSError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "it is cut off, damaged or of another kind"
        raise ConfigError(f"data.path: {path} is no sound Parquet file ({why}); fetch or write it again.") from error


def _check_utf8(text: bytes, path: Path, start: int = 0) -> None:
    offset = utf8_error(text)
    if offset is not None:
        raise ConfigError(
            f"data.path: {path} is not UTF-8 text (byte 0x{text[offset]:02x} at offset {start + offset}); "
            "convert it to UTF-8 first."
        )


def _cut_at_newlines(text: bytes | mmap.mmap, size: int, path: Path) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            cut = text.rfind(b"\n", start, end) + 1 or text.rfind(b" ", start, end) + 1
            if cut:
                end = cut
            else:
                while end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
                    end += 1
        piece = text[start:end]
        _check_utf8(piece, path, start)
        yield piece
        start = end
