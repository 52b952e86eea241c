"""`data=tokens`: equal ids in any format give equal batches; what is wrong is said before the first step."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_formats import IDS, POINTER, WRITERS, llmc, nanogpt

from stability_lab.config import ConfigError, SamplingConfig
from stability_lab.data.loader import batch_fingerprint, build_sampler, check_length
from stability_lab.data.source import TokenData
from stability_lab.data.sources.token_files import TokenFiles
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2
from stability_lab.data.tokens import scan as scan_module


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "cache"))


def load(path: Path | str, **options: Any) -> TokenData:
    return TokenFiles(path=str(path), **{"dtype": "uint16", **options}).load(Gpt2())


def fingerprints(data: TokenData) -> list[str]:
    orders = (SamplingConfig(name, False, False) for name in ("permutation", "random_window"))
    return [batch_fingerprint(build_sampler(data, 16, 3, order).batch(5, 8)) for order in orders]


def test_every_format_gives_the_same_batches(tmp_path: Path) -> None:
    seen = []
    for name, write in WRITERS.items():
        folder = tmp_path / name
        folder.mkdir()
        data = load(write(folder, IDS))
        seen.append((*fingerprints(data), data.fingerprint, data.unigram_entropy, data.train_tokens, data.val_tokens))
    assert len(set(seen)) == 1
    cut = len(IDS) - round(0.05 * len(IDS))
    assert seen[0][-2:] == (cut, len(IDS) - cut)


def test_a_folder_knows_its_splits(tmp_path: Path) -> None:
    parts = np.split(IDS, [2000, 3000])
    for name, ids in zip(("x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin"), parts, strict=True):
        llmc(tmp_path, ids).rename(tmp_path / name)
    data = load(tmp_path)
    assert (data.train_tokens, data.val_tokens) == (3000, 2000)
    np.testing.assert_array_equal(data.val, parts[2])
    assert data.corpus["files"] == 2
    whole = load(tmp_path / "x_train_*.bin", val_path=str(tmp_path / "x_val_000000.bin"))
    assert fingerprints(whole) == fingerprints(data)


def test_text_is_known_with_its_tokenizer_only(tmp_path: Path) -> None:
    path = nanogpt(tmp_path, IDS)
    known, unknown = load(path), load(path, vocab_size=60_000, eos_id=7)
    assert (known.vocab_size, known.eos_id, known.bytes_of(known.val) > 0) == (50_257, 50_256, True)
    assert (unknown.vocab_size, unknown.eos_id, unknown.bytes_of(unknown.val)) == (60_000, 7, 0)
    assert unknown.tokenizer is None


def test_a_mark_before_the_first_document_stands_before_all(tmp_path: Path) -> None:
    before = llmc(tmp_path, np.concatenate([[50_256], IDS % 50_256]))
    assert load(before).eos_first
    assert not load(nanogpt(tmp_path, IDS % 50_256)).eos_first


def test_the_second_load_scans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nanogpt(tmp_path, IDS)
    first = load(path)

    def refuse(*args: object) -> None:
        raise AssertionError("scanned again")

    monkeypatch.setattr(scan_module, "_scan", refuse)
    assert load(path).fingerprint == first.fingerprint
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(AssertionError, match="scanned again"):
        load(path)


def _ids(folder: Path, ids: np.ndarray, dtype: str = "uint16") -> Path:
    path = folder / "ids.bin"
    ids.astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda f: _ids(f, IDS),
            {"vocab_size": 1000},
            r"id [\d,]+ at offset \d+ is not in the vocabulary of 1,000 ids",
        ),
        (lambda f: _ids(f, IDS, "uint32"), {}, "probably uint32: set data.dtype=uint32"),
        (lambda f: _ids(f, IDS), {"dtype": "uint32"}, "set data.dtype if the ids are not uint32"),
        (lambda f: _ids(f, IDS), {"dtype": "uint16", "vocab_size": 128_256}, "larger ids were wrapped"),
        (lambda f: _ids(f, IDS), {"vocab_size": 60_000, "eos_id": 60_001}, "eos_id=60001: must be an id"),
        (lambda f: _ids(f, IDS), {"val_path": "nowhere*.bin"}, r"data\.val_path=nowhere\*\.bin: no token file"),
        (lambda f: f / "none.bin", {}, r"data\.path=.*none\.bin: no token file there"),
        (lambda f: f, {}, "no token file there"),
    ],
)
def test_bad_input(make: Callable[[Path], Path], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(make(tmp_path), **options)


@pytest.mark.parametrize(
    ("n", "fits"), [(1, "no context fits; give more"), (2, "no context"), (60, "the longest .* is 2")]
)
def test_data_shorter_than_the_context(n: int, fits: str, tmp_path: Path) -> None:
    data = load(_ids(tmp_path, IDS[:n]))
    with pytest.raises(ConfigError, match=r"model\.seq_len=64: .* has only \d+ token\(s\); " + fits):
        check_length(data, 64)


def test_the_place_of_a_bad_id(tmp_path: Path) -> None:
    ids = np.zeros(9_000_000, np.uint16)
    ids[8_888_888] = 50_257
    with pytest.raises(ConfigError, match=r"ids\.bin: id 50,257 at offset 8,888,888 is not"):
        load(_ids(tmp_path, ids))
    np.save(tmp_path / "signed.npy", np.array([5, 6, -1, 7] * 9))
    with pytest.raises(ConfigError, match=r"signed\.npy: id -1 at offset 2 is not"):
        load(tmp_path / "signed.npy")


def test_a_tokenizer_that_learns_has_nothing_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer=bpe learns from text"):
        TokenFiles(path=str(_ids(tmp_path, IDS)), dtype="uint16").load(Bpe(300))


def test_a_type_that_is_too_narrow_is_refused_however_it_was_asked_for(tmp_path: Path) -> None:
    ids = np.frombuffer(b"to be or not to be, " * 250, np.uint8).astype(np.int64)
    ids[::50] = 256
    path = _ids(tmp_path, ids)
    with pytest.raises(ConfigError, match=r"ids\.bin: read as uint8, .* probably uint16: set data\.dtype=uint16"):
        TokenFiles(path=str(path), dtype="uint8").load(ByteTokenizer())
    assert TokenFiles(path=str(path), dtype="uint16").load(ByteTokenizer()).train_tokens > 4000
    np.save(tmp_path / "insists.npy", np.fromfile(path, np.uint8))
    assert TokenFiles(path=str(tmp_path / "insists.npy"), vocab_size=256).load(ByteTokenizer()).train_tokens > 9000


@pytest.mark.parametrize("kind", ["characters", "random", "one of two shards"])
def test_small_ids_that_cannot_be_bytes(kind: str, tmp_path: Path) -> None:
    """Those of nanoGPT's shakespeare_char, for one: 0 to 64."""
    ids = np.random.default_rng(0).integers(0, {"random": 200}.get(kind, 65), 5000)
    ids[7] = {"random": 199}.get(kind, 64)
    path, largest = _ids(tmp_path, ids), ids.max()
    if kind == "one of two shards":
        largest = ord("x")
        np.frombuffer(b"good text " * 99, np.uint8).astype(np.uint16).tofile(tmp_path / "first.bin")
    source = TokenFiles(path=str(tmp_path), dtype="uint16")
    with pytest.raises(ConfigError, match=rf"ids\.bin: its ids are no bytes .*data\.vocab_size={largest + 1}"):
        source.load(ByteTokenizer())
    assert load(path, vocab_size=200).tokenizer is None


def test_bytes_of_text_that_begin_and_end_within_a_character(tmp_path: Path) -> None:
    text = "é🙂 naïve 你好\n".encode() * 99
    for name, part in (("a.bin", text[:3001]), ("b.bin", text[3001:]), ("c.bin", "🙂".encode()[1:] + text[:-1])):
        np.append(np.frombuffer(part, np.uint8), 256).astype(np.uint16).tofile(tmp_path / name)
    assert TokenFiles(path=str(tmp_path), dtype="uint16").load(ByteTokenizer()).tokenizer is not None


def test_all_bad_shards_of_a_mixture_are_named(tmp_path: Path) -> None:
    for i in range(9):
        llmc(tmp_path, IDS).rename(tmp_path / f"x_train_{i}.bin")
    (tmp_path / "x_train_3.bin").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"x_train_3\.bin is a Git LFS pointer, .* git lfs pull$"):
        load(tmp_path)
    (tmp_path / "x_train_7.bin").write_bytes(b"x" * 99)
    (tmp_path / "x_val_0.bin").write_bytes((tmp_path / "x_train_0.bin").read_bytes()[:-2])
    names = r"x_train_3\.bin, x_train_7\.bin, x_val_0\.bin"
    with pytest.raises(ConfigError, match=rf"x_train_3\.bin is a Git .*\(3 of 10 files are refused: {names}\)"):
        load(tmp_path)
    for i in (0, 1, 2, 4):
        (tmp_path / f"x_train_{i}.bin").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"\(7 of 10 files are refused: .*x_train_4\.bin and 2 more\)"):
        load(tmp_path)


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = nanogpt(tmp_path, IDS)
    assert load("~/train.bin", val_path="~/*.bin").fingerprint == load(path, val_path=str(path)).fingerprint
    with pytest.raises(ConfigError, match=r"data\.path=~nobody_of_this_name/x\.bin: no token file there"):
        load("~nobody_of_this_name/x.bin")


def test_bytes_may_go_without_an_end(tmp_path: Path) -> None:
    path = _ids(tmp_path, np.frombuffer("aé🙂\n".encode() * 99, np.uint8), "uint8")
    data = TokenFiles(path=str(path), dtype="uint8").load(ByteTokenizer())
    assert data.vocab_size == 257
    with pytest.raises(ConfigError, match=re.escape("do not fit") + "|does not fit"):
        load(path, dtype="uint8")


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"vocab_size": 1}, {"eos_id": -1}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}="):
        TokenFiles(path="x", **options)
