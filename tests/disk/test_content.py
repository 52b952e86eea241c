"""Files as their own programs write them are known by their first bytes; ids and text are none of them."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stability_lab.disk.content import HEAD, is_other_text, is_utf8, kind_of


def written(write) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name, "x")
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("x.txt"))
    return buffer.getvalue()


WEIGHTS = {"step": 3, "lr": [1e-3, 2e-3], "weight": torch.arange(9.0)}
ROWS = [{"text": f"document {i}", "id": i} for i in range(20)]
HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


def llmc(magic: int) -> bytes:
    return struct.pack("<256i", magic, 1, 8, *[0] * 253) + bytes(16)


KINDS = [
    ("pointer", POINTER),
    ("pointer", b"/annex/objects/MD5E-s9--0123456789abcdef.bin\n"),
    ("safetensors", SAFETENSORS),
    ("safetensors", struct.pack("<Q", 2) + b"{}"),
    ("torch", written(lambda f: torch.save(WEIGHTS, f))),
    ("torch", written(lambda f: torch.save(WEIGHTS, f, _use_new_zipfile_serialization=False))),
    ("npz", written(lambda f: np.savez(f, ids=np.arange(9)))),
    ("npz", written(lambda f: np.savez_compressed(f, np.arange(9)))),
    ("zip", archive("x.txt")),
    ("zip", archive()),
    *(
        ("pickle", pickle.dumps(value, protocol))
        for protocol in range(2, 6)
        for value in (WEIGHTS, ROWS, np.arange(10**5))
    ),
    ("pickle", pickle.dumps([], 2)),
    ("gzip", gzip.compress(b"text", mtime=0)),
    ("llm.c", llmc(20240326)),
    ("llm.c", llmc(20240328)),
    ("llm.c", llmc(20240522)),
    ("tntidx", b"TNTIDX\0\0" + struct.pack("<4Q", 1, 8, 3, 4)),
    ("mmididx", b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8)),
    ("tar", tar()),
    ("bzip2", bz2.compress(b"text")),
    ("xz", lzma.compress(b"text")),
    ("parquet", written(lambda f: pq.write_table(pa.table({"text": ["a"]}), f))),
    ("parquet", written(lambda f: pq.write_table(pa.table({"text": pa.array([], pa.string())}), f))),
    ("arrow", written(lambda f: pa.ipc.new_file(f, pa.schema([("text", pa.string())])).close())),
    ("npy", written(lambda f: np.save(f, np.arange(9)))),
    ("gguf", b"GGUF\3\0\0\0" + bytes(40)),
]


@pytest.mark.parametrize(("name", "content"), KINDS)
def test_kinds(name: str, content: bytes) -> None:
    kind = kind_of(content[:HEAD], len(content))
    assert kind is not None
    assert kind.name == name


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("low", [1, 640, 2**10])
def test_ids_are_no_kind(dtype: str, low: int) -> None:
    """Those that begin like a pickle of protocol 2 (0x80 0x02) among them."""
    draw = np.random.default_rng(0)
    for i in range(300):
        content = np.array([low, *draw.integers(1, 50_257, 200)]).astype(dtype).tobytes()
        assert kind_of(content, len(content)) is None, i
        assert dtype == "uint8" or not (is_utf8(content) or is_other_text(content))


@pytest.mark.parametrize("text", ["plain words", "naïve 你好 🙂", "%", "{}", "[1]", "PKs and BZh9", "GGUF is PAR1"])
def test_text_is_no_kind(text: str) -> None:
    content = text.encode()
    assert kind_of(content, len(content)) is None
    assert is_utf8(content)
    assert is_utf8(content[:-1] if len(content) > len(text) else content)  # a head may end within a character


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le"])
def test_text_in_other_encodings(encoding: str) -> None:
    content = ("Où est le café?\n" * 30).encode(encoding)
    assert not is_utf8(content)
    assert is_other_text(content) == (encoding != "utf-16-le")  # without a mark, which looks like ids


def test_nothing_is_executed() -> None:
    class Fails:
        def __reduce__(self):
            return (pytest.fail, ("executed",))

    content = pickle.dumps([Fails()], 2)
    assert kind_of(content, len(content)) is not None
