"""Each format is written by a few independent lines and read back as the same ids."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from stability_lab.config import ConfigError
from stability_lab.data.tokens import formats
from stability_lab.data.tokens.formats import Region, looks_like_wider_ids, recognise

IDS = np.random.default_rng(0).integers(0, 50_257, 5000)


def nanogpt(folder: Path, ids: np.ndarray) -> Path:
    path = folder / "train.bin"
    ids.astype(np.uint16).tofile(path)
    return path


def llmc(folder: Path, ids: np.ndarray, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    path = folder / "fineweb_train_000001.bin"
    header = [magic, version, len(ids)] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + ids.astype(dtype).tobytes())
    return path


def llama3(folder: Path, ids: np.ndarray) -> Path:
    return llmc(folder, ids, 20240801, 7, "<u4")


def numpy_file(folder: Path, ids: np.ndarray) -> Path:
    path = folder / "ids.npy"
    np.save(path, ids.astype(np.int32))
    return path


def olmo(folder: Path, ids: np.ndarray) -> Path:
    path = folder / "part-0-00000.npy"
    array = np.memmap(path, dtype=np.uint16, mode="w+", shape=ids.shape)
    array[:] = ids
    array.flush()
    return path


def megatron(folder: Path, ids: np.ndarray, cut: int = 1200) -> Path:
    lengths = [cut, 300, len(ids) - cut - 300]
    path = folder / "text_document.bin"
    ids.astype("<u2").tofile(path)
    pointers = [0, 2 * lengths[0], 2 * (lengths[0] + lengths[1])]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", *pointers) + struct.pack("<4q", 0, 1, 2, 3)
    path.with_suffix(".idx").write_bytes(index)
    return path


WRITERS = {
    "raw": nanogpt,
    "llm.c": llmc,
    "llama3": llama3,
    "npy": numpy_file,
    "olmo": olmo,
    "megatron": megatron,
}
Writer = Callable[[Path, np.ndarray], Path]


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    found = recognise(WRITERS[name](tmp_path, IDS), "uint16")
    assert found.format == {"llama3": "llm.c", "olmo": "raw"}.get(name, name)
    np.testing.assert_array_equal(found.region.map(), IDS)


@pytest.mark.parametrize("dtype", formats.DTYPES)
def test_raw_ids_of_any_width(dtype: str, tmp_path: Path) -> None:
    ids = IDS % 256
    ids.astype(dtype).tofile(tmp_path / "ids.npy")
    np.testing.assert_array_equal(recognise(tmp_path / "ids.npy", dtype).region.map(), ids)


def test_megatron_has_documents_and_both_names(tmp_path: Path) -> None:
    path = megatron(tmp_path, IDS)
    for name in (path, path.with_suffix(".idx")):
        found = recognise(name, "uint16")
        assert found.documents is not None
        np.testing.assert_array_equal(found.documents, [0, 1200, 1500])


def test_chunks_are_all_ids_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK", 999)
    region = recognise(llmc(tmp_path, IDS), "uint16").region
    chunks = list(region.chunks())
    assert [len(chunk) for chunk in chunks] == [999] * 5 + [5]
    np.testing.assert_array_equal(np.concatenate(chunks), IDS)


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1])
    return path


def _bad_index(folder: Path) -> Path:
    path = megatron(folder, IDS)
    index = path.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    raw[34 + 12 : 34 + 20] = struct.pack("<q", 2)  # the first pointer
    index.write_bytes(bytes(raw))
    return path


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: _cut(nanogpt(f, IDS)), "9,999 bytes are no whole number of uint16 ids"),
        (lambda f: _cut(llmc(f, IDS)), "promises 5,000 ids, 11,024 bytes in all, and the file has 11,023"),
        (lambda f: llmc(f, IDS, version=2), "version 2 of the llm.c format"),
        (lambda f: _cut(megatron(f, IDS)), "9,999 bytes, and text_document.idx counts 5,000 ids of 2"),
        (_bad_index, "do not follow one another"),
        (lambda f: _write(f, "x.bin", b""), "is empty"),
        (lambda f: llmc(f, IDS[:0]), "holds no token"),
        (lambda f: _write(f, "x.npy", b"\x93NUMPY\x01\x00"), "damaged .npy"),
        (lambda f: f / "none.bin", "cannot be read"),
    ],
)
def test_damaged_files_are_named(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        recognise(path, "uint16")
    assert path.stem in str(error.value)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
EVALUATION = struct.pack("<256i", 20240522, 1, 8, *[0] * 253) + bytes(16)


def _torch(folder: Path) -> Path:
    torch.save({"weight": torch.zeros(3)}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def _beside_an_old_index(folder: Path) -> Path:
    _write(folder, "train.idx", b"TNTIDX\0\0" + bytes(32))
    return _write(folder, "train.bin", IDS.astype("<u2").tobytes())


@pytest.mark.parametrize("dtype", [None, "uint16"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: _write(f, "p.bin", POINTER), r"p\.bin is a Git LFS pointer.*fetch it with git lfs pull"),
        (lambda f: _write(f, "e.bin", EVALUATION), r"e\.bin is an evaluation set of llm\.c \(magic 20240522\)"),
        (_torch, r"ckpt\.pt is a checkpoint of torch\.save"),
        (lambda f: _write(f, "x.bin", gzip.compress(b"x")), r"x\.bin is gzipped: unpack it first"),
        (_beside_an_old_index, r"train\.idx is an index of fairseq or of an older Megatron \(TNTIDX\): preprocess"),
        (lambda f: _write(f, "only.idx", b"MMIDIDX\0\0" + bytes(32)), r"only\.idx is the index .*\.bin of the same"),
        (
            lambda f: _write(f, "book.txt", b"once upon a time\n" * 9),
            r"is text and holds no ids: .*data=text data\.path",
        ),
        (lambda f: _write(f, "latin.txt", b"caf\xe9 " * 99), r"latin\.txt is text in another encoding than UTF-8"),
    ],
)
def test_what_holds_no_ids_is_named_whatever_the_type(
    make: Callable[[Path], Path], message: str, dtype: str | None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        recognise(make(tmp_path), dtype)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("written", "likely"), [("uint16", "uint16"), ("uint32", "uint32"), ("uint64", "uint64")])
def test_ids_without_a_header_need_a_word(written: str, likely: str, tmp_path: Path) -> None:
    IDS.astype(written).tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError, match=rf"x\.bin has no header .* nanoGPT .*: data\.dtype={likely}$"):
        recognise(tmp_path / "x.bin", None)
    np.testing.assert_array_equal(recognise(tmp_path / "x.bin", likely).region.map(), IDS)


def test_the_bytes_of_text_may_be_ids(tmp_path: Path) -> None:
    text = b"once upon a time\n" * 99
    region = recognise(_write(tmp_path, "book.txt", text), "uint8").region
    assert region.map().tobytes() == text


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.uint16), np.zeros(5)])
def test_arrays_that_are_no_ids(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ConfigError, match="one dimension of whole numbers"):
        recognise(tmp_path / "x.npy", "uint16")


@pytest.mark.parametrize(
    ("written", "read", "expected"),
    [
        ("uint16", "uint16", None),
        ("uint32", "uint16", "uint32"),
        ("uint64", "uint16", "uint64"),
        ("uint64", "uint32", "uint64"),
        ("uint16", "uint8", None),
        ("uint32", "uint32", None),
    ],
)
def test_ids_that_are_wider_than_read(written: str, read: str, expected: str | None, tmp_path: Path) -> None:
    IDS.astype(written).tofile(tmp_path / "x.bin")
    assert looks_like_wider_ids(recognise(tmp_path / "x.bin", read).region) == expected


def _ids(kind: str) -> np.ndarray:
    ids = np.random.default_rng(1).integers(0, 256, 5000)
    if kind == "bytes with ends":
        ids[::100] = 256
    elif kind == "one large":
        ids[500] = 70_000
    elif kind == "two values":
        ids %= 2
    elif kind == "padding":
        ids[:4800] = 0
    elif kind == "padding that few ends break":
        ids[:] = 0
        ids[1::50] = 7
    return ids


@pytest.mark.parametrize(
    ("kind", "written", "read", "expected"),
    [
        ("bytes with ends", "uint16", "uint8", "uint16"),
        ("one large", "uint32", "uint16", "uint32"),
        ("one large", "uint64", "uint16", "uint64"),
        ("two values", "uint16", "uint16", None),
        ("two values", "uint32", "uint16", "uint32"),
        ("padding", "uint16", "uint16", None),
        ("padding that few ends break", "uint16", "uint16", None),
        ("bytes", "uint16", "uint16", None),
    ],
)
def test_most_upper_words_say_it(kind: str, written: str, read: str, expected: str | None, tmp_path: Path) -> None:
    _ids(kind).astype(written).tofile(tmp_path / "x.bin")
    assert looks_like_wider_ids(recognise(tmp_path / "x.bin", read).region) == expected


def test_positions_are_64_bit(tmp_path: Path) -> None:
    """A sparse file above 4 GiB, read near its end."""
    path, count = tmp_path / "large.bin", 2**31 + 2**20
    with path.open("wb") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 3))
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    region = recognise(path, "uint16").region
    assert region.count == count
    np.testing.assert_array_equal(region.map()[-4:], [0, 7, 8, 9])
    np.testing.assert_array_equal(region.map()[count - 2], 8)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="became shorter"):
        list(Region(nanogpt(tmp_path, IDS), np.dtype("<u2"), 0, 6000).chunks())
