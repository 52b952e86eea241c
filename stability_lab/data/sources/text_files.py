"""Documents out of text files: plain, JSON lines and Parquet, each of the first two also gzipped.

Everything is read in order and piece by piece. Only a single document has to fit into memory, and a large plain file
not even that: it is mapped and cut.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import itertools
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stability_lab.config import ConfigError
from stability_lab.data.source import Document

PIECE_BYTES = 16 * 1024
"""Aimed-at size of a piece where a few long files stand in for documents."""
LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
SUFFIXES = (".txt", *LINES, PARQUET)
Paths = list[tuple[str, Path]]


def text_paths(pattern: str) -> Paths:
    """(name, path) of a file, of a folder's text files or of what a glob matches, sorted by name.

    Names are relative to the files' common folder: moving the data leaves them as they are.
    """
    path = Path(os.path.expanduser(pattern))
    if os.path.isfile(path):  # unlike the methods of Path it never raises
        paths = [path]
    elif os.path.isdir(path):
        paths = [p for p in path.rglob("*") if p.is_file() and _kind(p) in SUFFIXES]
        if not paths:
            raise ConfigError(f"data.path={pattern}: the folder holds no .txt file, nor .jsonl or .parquet.")
    elif glob.has_magic(pattern):
        paths = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not paths:
            raise ConfigError(f"data.path={pattern}: no file matches this pattern (from {Path.cwd()}).")
    else:
        raise ConfigError(
            f"data.path={pattern}: no such file or folder (from {Path.cwd()}); "
            "give a text file, a folder of .txt, .jsonl or .parquet files, or a glob pattern."
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
            rows = _parquet_rows(path, field) if _kind(path) == PARQUET else _json_lines(path, field)
            yield from ((f"{name}#{number:09d}", text) for number, text in rows)
        else:
            with _opened(path) as file:
                text = file.read()
            _check_utf8(text, path)
            yield name, text


def read_pieces(paths: Paths, field: str, at_least: int) -> Iterator[Document]:
    """The same text as pieces of about 16 KiB, or smaller ones so that there are some `at_least`.

    Pieces end after a newline, else after a space, else after a character.
    """
    size = min(PIECE_BYTES, max(1, sum(_text_bytes(path, field) for _, path in paths) // at_least))
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


def is_text(path: Path) -> bool:
    """Whether a file is text by its name or, as far as its first 64 KiB show, by its content."""
    with _opened(path) as file:
        head = file.read(2**16)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # which allows half a character at the end
    except UnicodeDecodeError:
        return _has_rows(path)
    return _has_rows(path) or (b"\0" not in head and head != b"")


def utf8_error(text: bytes) -> int | None:
    """Offset of the first byte that is not UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _kind(path: Path) -> str:
    """The suffix that counts: that before .gz."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _has_rows(path: Path) -> bool:
    return _kind(path) in (*LINES, PARQUET)


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


def _text_bytes(path: Path, field: str) -> int:
    if _is_plain(path):
        return path.stat().st_size
    return sum(len(text) for _, text in read_documents([("", path)], field))


def _json_lines(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """(line, text), counted from 1."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"data.path: {path}, line {number} is not JSON ({error}).") from error
            text = row.get(field, False) if isinstance(row, dict) else False
            if isinstance(text, str):
                # JSON can spell half of a surrogate pair, which no UTF-8 is.
                yield number, text.encode(errors="replace")
            elif text is not None:
                keys = ", ".join(map(str, row)) if isinstance(row, dict) else "no object"
                raise ConfigError(
                    f"data.field={field}: {path}, line {number} has no text under it (it has {keys}); "
                    "name the field that holds the text."
                )


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
