"""Files of token ids that other projects write, recognised by what is in them.

| format | what the file is |
|---|---|
| raw | ids and nothing else: nanoGPT's `.bin`, OLMo's `.npy` without a header; only where the user says so |
| llm.c | 256 int32 of header (magic, version, number of ids), then ids: llm.c and modded-nanogpt |
| npy | numpy's own format, one dimension of whole numbers |
| megatron | ids in `.bin`, with the documents' lengths in an `.idx` beside it |
| prepared | a folder that `data prepare` wrote (`prepared.py`) |

A raw file says neither what it is nor how many bytes an id has. Both are said by the type that the user gives, and
without one the file is refused. All positions are 64-bit; nothing here reads more than the header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.disk.content import HEAD, is_other_text, is_utf8, kind_of
from stability_lab.disk.files import open_file

DTYPES = ("uint8", "uint16", "uint32", "uint64")
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic number -> (version, type of an id): GPT-2's and Llama 3's files of llm.c."""
LLMC_HEADER_BYTES = 256 * 4
NUMPY_MAGIC = b"\x93NUMPY"
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SELDOM = 0.1
"""Ids look wider than they are read where a smaller share than this of the upper words is not 0."""
CHUNK = 2**22
"""Ids that are in memory at once while a file is read from end to end."""


@dataclass(frozen=True)
class Region:
    """`count` ids of type `dtype` from byte `offset` of a file on."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int

    def map(self) -> np.ndarray:
        """A read-only memory map, shape (count,), as a plain array: np.memmap pays for its class at each access."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,)).view(
            np.ndarray
        )

    def chunks(self) -> Iterator[np.ndarray]:
        """All ids in order, at most `CHUNK` at a time; read and not mapped, so that memory stays flat."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.count
            while left:
                part = np.fromfile(file, dtype=self.dtype, count=min(left, CHUNK))
                if not len(part):
                    raise ConfigError(f"{self.path}: the file became shorter while it was read; start again")
                left -= len(part)
                yield part


class FoundFormat(NamedTuple):
    """What a file is. `documents` are the positions of the documents' first ids where the format has them."""

    format: str
    region: Region
    documents: npt.NDArray[np.int64] | None = None


def recognise(path: Path, raw_dtype: str | None, option: str = "data.dtype") -> FoundFormat:
    """What `path` is, by content; ids without a header are read as `raw_dtype`, and refused where it is None.

    ConfigError names the file, what it is or what is wrong with it, and what to do. `option` is what gives the type.
    """
    path = megatron_ids(path)
    try:
        size = path.stat().st_size
        with open_file(path, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    if size == 0:
        raise ConfigError(f"{path} is empty; give a file of token ids")
    index = path.with_suffix(".idx")
    magic = index.read_bytes()[: len(MEGATRON_MAGIC)] if path.suffix == ".bin" and index.is_file() else b""
    if head.startswith(NUMPY_MAGIC):
        found = FoundFormat("npy", numpy_region(path))
    elif len(head) >= LLMC_HEADER_BYTES and struct.unpack("<i", head[:4])[0] in LLMC:
        found = FoundFormat("llm.c", _llmc_region(path, size, head))
    elif magic == MEGATRON_MAGIC:
        found = _megatron(path, size, index)
    else:
        if magic:
            _refuse_other_kinds(index, magic, index.stat().st_size)
        _refuse_other_kinds(path, head, size)
        dtype = _stated(path, head, size, raw_dtype, option)
        found = FoundFormat("raw", _raw_region(path, size, np.dtype(dtype).newbyteorder("<"), option))
    if found.region.count == 0:
        raise ConfigError(f"{path} holds no token; give a file of token ids")
    return found


def _refuse_other_kinds(path: Path, head: bytes, size: int) -> None:
    if kind := kind_of(head, size):
        raise ConfigError(f"{path} {kind.what}: {kind.todo or 'give a file of token ids'}")


def _stated(path: Path, head: bytes, size: int, raw_dtype: str | None, option: str) -> str:
    """`raw_dtype`; ConfigError where it is None, or where the content cannot be such ids but is text."""
    if raw_dtype is None or (raw_dtype != "uint8" and len(head) >= 64):  # uint8: the bytes of text are ids
        if is_utf8(head):
            raise ConfigError(f"{path} is text and holds no ids: train on it with data=text data.path={path}")
        if is_other_text(head):
            raise ConfigError(f"{path} is text in another encoding than UTF-8: convert it, and use data=text")
    if raw_dtype is not None:
        return raw_dtype
    likely = looks_like_wider_ids(_raw_region(path, size, np.dtype("<u2"), option)) or "uint16"
    raise ConfigError(
        f"{path} has no header that says what it is; if it is ids and nothing else, as nanoGPT and OLMo write them, "
        f"say so by their type: {option}={likely}"
    )


def megatron_ids(path: Path) -> Path:
    """The `.bin` of an `.idx`; any other path as it is."""
    return path.with_suffix(".bin") if path.suffix == ".idx" and path.with_suffix(".bin").is_file() else path


def looks_like_wider_ids(region: Region) -> str | None:
    """The type that ids probably have where `region` reads each as several: small ids leave most upper words 0.

    Where ids are 0 everywhere, as in padding, that says nothing: the lowest words must be others far more often.
    """
    if region.dtype.kind != "u" or region.dtype.itemsize > 4:
        return None
    sample = region.map()[: 2**16]
    if len(sample) < 64 or not sample.any():
        return None
    for factor in (4, 2):
        words = sample[: len(sample) // factor * factor].reshape(-1, factor)
        wider = region.dtype.itemsize * factor
        used = (words != 0).mean(axis=0)  # share of each place in the wider id that is not 0
        upper = used[1:].max()
        if wider <= 8 and upper < SELDOM and used[0] > 5 * upper and len(np.unique(words[:, 0])) > 1:
            return f"uint{8 * wider}"
    return None


def _raw_region(path: Path, size: int, dtype: np.dtype, option: str) -> Region:
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size:,} bytes are no whole number of {dtype.name} ids; it was cut short, is no file of ids, or "
            f"set {option} to one of {', '.join(DTYPES)}"
        )
    return Region(path, dtype, 0, size // dtype.itemsize)


def _llmc_region(path: Path, size: int, head: bytes) -> Region:
    magic, version, count = struct.unpack("<3i", head[:12])
    known, dtype = LLMC[magic]
    if version != known:
        raise ConfigError(f"{path}: version {version} of the llm.c format with magic {magic}; known is {known}")
    region = Region(path, np.dtype(dtype), LLMC_HEADER_BYTES, count)
    expected = LLMC_HEADER_BYTES + count * region.dtype.itemsize
    if count < 0 or size != expected:
        raise ConfigError(
            f"{path}: its header promises {count:,} ids, {expected:,} bytes in all, and the file has {size:,}; "
            "fetch or write it again"
        )
    return region


def numpy_region(path: Path) -> Region:
    """The ids of a .npy file; ConfigError where it is none, or is damaged."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        why = (isinstance(error, OSError) and error.strerror) or "it is cut off, or holds Python objects"
        raise ConfigError(f"{path} is a damaged .npy file ({why}); write an array of ids with numpy.save") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: an array of shape {array.shape} and type {array.dtype}; token ids are one dimension of whole "
            "numbers"
        )
    return Region(path, array.dtype, path.stat().st_size - array.nbytes, len(array))


def _megatron(path: Path, size: int, index: Path) -> FoundFormat:
    head = struct.Struct("<9sQBQQ")
    raw = index.read_bytes()
    if len(raw) < head.size:
        raise ConfigError(f"{index}: the index is cut short; write it again")
    _, version, code, n_sequences, n_documents = head.unpack_from(raw)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise ConfigError(f"{index}: version {version} and type code {code}; known are version 1 and whole numbers")
    if len(raw) < head.size + 12 * n_sequences + 8 * n_documents:
        raise ConfigError(f"{index}: the index of {n_sequences:,} sequences is cut short; write it again")
    lengths = np.frombuffer(raw, "<i4", n_sequences, head.size).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", n_sequences, head.size + 4 * n_sequences)
    documents = np.frombuffer(raw, "<i8", n_documents, head.size + 12 * n_sequences)
    dtype = np.dtype(MEGATRON_DTYPES[code])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    if not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        raise ConfigError(f"{index}: its sequences do not follow one another in {path.name}; write the pair again")
    if size != starts[-1] * dtype.itemsize:
        raise ConfigError(
            f"{path}: {size:,} bytes, and {index.name} counts {starts[-1]:,} ids of {dtype.itemsize}; they do not "
            "belong together, or one was cut short"
        )
    return FoundFormat("megatron", Region(path, dtype, 0, int(starts[-1])), starts[documents[documents < n_sequences]])
