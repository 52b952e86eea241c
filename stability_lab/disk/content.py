"""What a file is, by its first bytes: kinds that are often given where text or token ids belong."""

from __future__ import annotations

import codecs
import pickletools
import struct
from typing import NamedTuple

HEAD = 2**16
"""Bytes from the beginning of a file that the functions here want to see."""
_CHECKPOINT = "is a checkpoint of torch.save"


class Kind(NamedTuple):
    """`what` follows the file's name in a sentence; `todo`, where given, is what to do about it."""

    name: str
    what: str
    todo: str | None = None


_MAGICS = (
    (
        b"version https://git-lfs",
        Kind("pointer", "is a Git LFS pointer, not the file itself", "fetch it with git lfs pull"),
    ),
    (
        b"/annex/objects/",
        Kind("pointer", "is a pointer of git-annex, not the file itself", "fetch it with git annex get"),
    ),
    (b"\x1f\x8b\x08", Kind("gzip", "is gzipped", "unpack it first (gzip -d)")),
    *(
        (b"BZh%d1AY&SY" % level, Kind("bzip2", "is compressed with bzip2", "unpack it first (bzip2 -d)"))
        for level in range(1, 10)
    ),
    (b"\xfd7zXZ\0", Kind("xz", "is compressed with xz", "unpack it first (xz -d)")),
    (b"\x28\xb5\x2f\xfd", Kind("zstd", "is compressed with Zstandard", "unpack it first (zstd -d)")),
    (b"7z\xbc\xaf\x27\x1c", Kind("7z", "is a 7z archive", "unpack it first")),
    (
        b"PAR1\x15",
        Kind("parquet", "is a Parquet file", "text in one is for data=text, under a name that ends in .parquet"),
    ),
    (b"ARROW1\0\0", Kind("arrow", "is an Arrow file", "text in one is for data=hub data.name=arrow")),
    (b"\x93NUMPY", Kind("npy", "is a numpy array", "ids in one are for data=tokens")),
    (
        b"TNTIDX\0\0",
        Kind(
            "tntidx",
            "is an index of fairseq or of an older Megatron (TNTIDX)",
            "preprocess the text again with a Megatron that writes MMIDIDX",
        ),
    ),
    (b"MMIDIDX\0\0", Kind("mmididx", "is the index of a Megatron pair", "put the .bin of the same name beside it")),
    (b"\x89HDF\r\n\x1a\n", Kind("hdf5", "is an HDF5 file")),
    *((b"GGUF%c\0" % version, Kind("gguf", "is a model in GGUF")) for version in range(1, 9)),
    *((magic, Kind("ggml", "is a model in a format of ggml")) for magic in (b"lmgg", b"fmgg", b"tjgg")),
    (b"SQLite format 3\0", Kind("sqlite", "is an SQLite database")),
    (b"%PDF-", Kind("pdf", "is a PDF", "extract its text first")),
    (b"\x89PNG\r\n\x1a\n", Kind("png", "is an image")),
    (b"\xff\xd8\xff", Kind("jpeg", "is an image")),
    (b"\x7fELF", Kind("elf", "is a program")),
)
_OF_LLMC = {
    20240326: "a model",
    20240327: "a debug state",
    20240328: "a tokenizer",
    20240522: "an evaluation set",
    20240527: "a training state",
}


def kind_of(head: bytes, size: int) -> Kind | None:
    """The kind of a file of `size` bytes that begins with `head`; None for text, ids and what is not known."""
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(head)
    if head[257:262] == b"ustar":
        return Kind("tar", "is a tar archive", "unpack it first (tar -xf)")
    if len(head) >= 8 and (number := struct.unpack("<i", head[:4])[0]) in _OF_LLMC:
        return Kind("llm.c", f"is {_OF_LLMC[number]} of llm.c (magic {number})")
    # A header of JSON after its length in 8 bytes.
    if head[8:10] in (b'{"', b"{}") and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return Kind("safetensors", "holds weights (safetensors)")
    return _pickle(head, size)


def is_utf8(head: bytes) -> bool:
    """Whether bytes are UTF-8, but for a character that is cut at the end, without a NUL."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head and head != b""


def is_other_text(head: bytes) -> bool:
    """Whether bytes look like text in another encoding than UTF-8: UTF-16 by its mark, else no control character."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = head.decode("utf-16", errors="replace")
        return sum(c.isprintable() or c.isspace() for c in text) > 0.99 * len(text)
    # Ids of two bytes pass this once in 10^13 files.
    return len(head) >= 256 and not any(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head)


def _zip(head: bytes) -> Kind:
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if first.endswith(b".npy"):
        return Kind("npz", "is an .npz archive of numpy arrays", "save the one array of ids with numpy.save")
    if first.endswith(b"/data.pkl"):
        return Kind("torch", f"{_CHECKPOINT} (a zip archive)")
    return Kind("zip", "is a zip archive", "unpack it first")


def _pickle(head: bytes, size: int) -> Kind | None:
    """Protocols from 2 on: two bytes say so, and a frame or opcodes follow. Nothing is executed."""
    if head[:1] != b"\x80" or head[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        return None
    if head.startswith(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9"):  # torch's number before everything else
        return Kind("torch", f"{_CHECKPOINT} (a pickle)")
    sure = head[2:3] == b"\x95" and int.from_bytes(head[3:11], "little") + 11 <= size
    opcodes = 0
    try:
        for opcode, _, position in pickletools.genops(head):
            opcodes += 1
            sure = sure or (opcode.name == "STOP" and position == size - 1)
    except Exception:  # whatever an argument raises that is cut or is none
        pass
    return Kind("pickle", "is a pickle of Python") if sure or opcodes >= 16 else None
