import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats

from stability_lab.config import ConfigError
from stability_lab.data.source import Documents
from stability_lab.data.sources.corpus import Corpus, Sotu, TextFiles, corpus_hash
from stability_lab.data.tokenizer import Bpe, BytePairs, ByteTokenizer, Gpt2, Tokenizer, TokenizerOptions
from stability_lab.data.tokens.memmap import cache_dir


@dataclass(frozen=True, kw_only=True)
class Words(Corpus):
    """Ten short documents."""

    name: ClassVar[str] = "words"
    val_every: int = 5

    def documents(self) -> Documents:
        return [(f"{i}.txt", b"abc" * (i + 1)) for i in range(10)]

    def about(self) -> dict[str, str | int]:
        return {"name": self.name}


@dataclass(frozen=True, kw_only=True)
class Prose(Corpus):
    """Thirty documents with more words, and characters of one to four bytes."""

    name: ClassVar[str] = "prose"
    val_every: int = 5
    year: int = 1800

    def documents(self) -> Documents:
        lines = (
            f"In the year {self.year + i} naïve 你好 🙂 <|endoftext|> of it's times\n" * (i % 7) for i in range(30)
        )
        return [(f"{i}.txt", line.encode()) for i, line in enumerate(lines)]

    def about(self) -> dict[str, str | int]:
        return {"name": self.name}


@dataclass(frozen=True)
class WideTokenizer:
    """A byte tokenizer whose ids start at 1,000 or higher."""

    vocab_size: int
    id = "wide-1"

    @property
    def special(self) -> Mapping[str, int]:
        return {}

    @property
    def eos_id(self) -> int:
        return self.vocab_size - 1

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint32) + np.uint32(self.vocab_size - 300)

    def decode(self, ids: object) -> str:
        raise AssertionError("nothing here decodes")

    def token_bytes(self) -> np.ndarray:
        counts = np.ones(self.vocab_size, dtype=np.int64)
        counts[self.eos_id] = 0
        return counts

    def fit(self, documents: Documents, saved: Path) -> "WideTokenizer":
        return self


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(folder))
    return folder


def _refuse(*args: object) -> None:
    raise AssertionError("encoded again")


def _files(cache: Path) -> list[Path]:
    """The two files of the one corpus; nothing half written is beside them."""
    assert len(list(cache.glob("scan-*"))) <= 1
    files = sorted(path for path in cache.iterdir() if not path.name.startswith("scan-"))
    assert [path.name[32:] for path in files] == ["-train.npy", "-val.npy"]
    return files


def test_tokens_are_the_documents_with_their_ends() -> None:
    data = Words().load(ByteTokenizer())
    documents = [text for _, text in Words().documents()]
    expected_val = documents[0] + documents[5]
    decoded = ByteTokenizer().decode(np.asarray(data.val))
    assert decoded == f"{documents[0].decode()}<|endoftext|>{documents[5].decode()}<|endoftext|>"
    assert data.val_bytes == len(expected_val) == data.val_tokens - 2
    train = [documents[i] for i in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert data.train_tokens == sum(map(len, train)) + 8
    assert (np.asarray(data.train) == data.eos_id).sum() == 8
    assert np.asarray(data.train)[-1] == data.eos_id == 256
    assert data.vocab_size == 257
    size = sum(map(len, documents))
    expected = {"name": "words", "sha256": corpus_hash(Words().documents()), "documents": 10, "bytes": size}
    assert data.corpus == expected


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Bpe(280), Gpt2()], ids=lambda tokenizer: tokenizer.id)
def test_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: TokenizerOptions) -> None:
    """So bits per byte means the same for every tokenizer: nothing is lost, and document ends count for nothing."""
    data = Prose().load(tokenizer)
    documents = [text for _, text in Prose().documents()]
    assert data.train.dtype == data.val.dtype == np.uint16
    assert data.bytes_of(data.val) == data.val_bytes == sum(map(len, documents[::5]))
    assert data.bytes_of(data.train) == sum(map(len, documents)) - data.val_bytes
    assert (
        data.bytes_of(np.asarray(data.val)[: data.val_tokens // 2 * 2].reshape(2, -1)) > 0
    )  # windows, as validation has them
    assert data.bytes_of(np.array([data.eos_id])) == data.bytes_of(np.array([], dtype=np.int64)) == 0
    assert (np.asarray(data.val) == data.eos_id).sum() == 6
    assert (np.asarray(data.train) == data.eos_id).sum() == 24


class Spy:
    """Options that show what `fit` was given."""

    id = "spy"

    def __init__(self) -> None:
        self.calls: list[tuple[Documents, Path]] = []

    def fit(self, documents: Documents, saved: Path) -> Tokenizer:
        self.calls.append((documents, saved))
        return ByteTokenizer()


def test_vocabulary_is_learned_from_training_documents_only() -> None:
    spy = Spy()
    Prose().load(spy)
    ((documents, _),) = spy.calls
    assert documents == [document for i, document in enumerate(Prose().documents()) if i % 5]


def test_vocabulary_is_kept_under_text_split_and_options(cache: Path) -> None:
    spies = [Spy() for _ in range(5)]
    spies[4].id = "other"
    for corpus, spy in zip([Prose(), Prose(), Prose(val_every=4), Prose(year=1900), Prose()], spies, strict=True):
        corpus.load(spy)
    paths = [spy.calls[0][1] for spy in spies]
    assert {path.parent for path in paths} == {cache}
    assert paths[0] == paths[1]
    assert len(set(paths)) == 4


def test_a_learned_vocabulary_is_cached_beside_its_tokens(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = Prose().load(Bpe(280))
    assert len(list(cache.glob("vocabulary-*"))) == 1
    monkeypatch.setattr(BytePairs, "encode", _refuse)
    monkeypatch.setattr(Bpe, "_train", _refuse)
    second = Prose().load(Bpe(280))
    np.testing.assert_array_equal(first.val, second.val)
    np.testing.assert_array_equal(first.token_bytes, second.token_bytes)
    assert first.fingerprint == second.fingerprint
    assert (second.vocab_size, second.eos_id) == (280, 279)


def test_another_version_of_the_library_learns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Prose().load(Bpe(280))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.0")
    second = Prose().load(Bpe(280))
    assert first.fingerprint != second.fingerprint
    np.testing.assert_array_equal(first.val, second.val)


def test_lost_vocabulary_is_learned_again_and_fits_the_tokens(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = Prose().load(Bpe(280))
    (vocabulary,) = cache.glob("vocabulary-*")
    vocabulary.write_text("{")
    monkeypatch.setattr(BytePairs, "encode", _refuse)
    assert Prose().load(Bpe(280)).fingerprint == first.fingerprint


def test_maps_are_read_only_and_small() -> None:
    data = Words().load(ByteTokenizer())
    assert data.train.dtype == data.val.dtype == np.uint16
    assert isinstance(data.train, np.ndarray)
    assert isinstance(data.train.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        data.train[0] = 1


def test_unigram_entropy_matches_scipy() -> None:
    data = Words().load(ByteTokenizer())
    _, counts = np.unique(data.train, return_counts=True)
    assert data.unigram_entropy == pytest.approx(scipy.stats.entropy(counts), abs=1e-12)
    # Closed form: three letters equally often and 8 document ends.
    n = data.train_tokens
    letter, end = (n - 8) / 3 / n, 8 / n
    assert data.unigram_entropy == pytest.approx(-3 * letter * np.log(letter) - end * np.log(end), abs=1e-12)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32), (200_000, np.uint32)])
def test_wide_vocabularies_use_four_bytes(vocab_size: int, dtype: type) -> None:
    tokenizer = WideTokenizer(vocab_size)
    data = Words().load(tokenizer)
    assert data.train.dtype == dtype
    text = Words().documents()[0][1]
    np.testing.assert_array_equal(data.val[: len(text)], tokenizer.encode(text))
    assert np.asarray(data.val)[len(text)] == vocab_size - 1


def test_second_load_reads_the_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = Words().load(ByteTokenizer())
    _files(cache)
    monkeypatch.setattr(ByteTokenizer, "encode", _refuse)
    second = Words().load(ByteTokenizer())
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.val, second.val)
    assert (first.fingerprint, first.unigram_entropy, first.val_bytes) == (
        second.fingerprint,
        second.unigram_entropy,
        second.val_bytes,
    )


def test_key_is_text_split_and_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    fingerprints = {
        corpus.load(tokenizer).fingerprint
        for corpus in (Prose(), Prose(val_every=4), Words(), TextFiles(path=str(tmp_path / "a.txt")))
        for tokenizer in (ByteTokenizer(), WideTokenizer(65_536), Bpe(257), Bpe(258), Gpt2())
    }
    assert len(fingerprints) == 20


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(path.read_bytes()[:90]),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe" * 200),
        lambda path: np.save(path, np.zeros((3, 4), dtype=np.uint16)),
    ],
)
def test_a_damaged_file_is_made_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path, split: str, damage: Callable[[Path], object]
) -> None:
    data = Words().load(ByteTokenizer())
    # Copies: reading a map of a file that was cut short kills the process.
    train, val = np.array(data.train), np.array(data.val)
    damage(_files(cache)[split == "val"])
    repaired = Words().load(ByteTokenizer())
    np.testing.assert_array_equal(repaired.train, train)
    np.testing.assert_array_equal(repaired.val, val)
    assert repaired.unigram_entropy == data.unigram_entropy
    monkeypatch.setattr(ByteTokenizer, "encode", _refuse)
    assert Words().load(ByteTokenizer()).train_tokens == len(train)


def test_ids_that_rotted_are_named(cache: Path) -> None:
    Words().load(ByteTokenizer())
    path = _files(cache)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\xff\xff")
    with pytest.raises(ConfigError, match=rf"{path.name}: id 65,535 at offset \d+ .*delete the file, which is damaged"):
        Words().load(ByteTokenizer())


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(self: ByteTokenizer, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        Words().load(ByteTokenizer())
    assert list(cache.iterdir()) == []


def test_maps_survive_when_another_process_writes_the_same(cache: Path) -> None:
    data = Words().load(ByteTokenizer())
    train = np.array(data.train)
    _files(cache)[0].unlink()
    Words().load(ByteTokenizer())
    np.testing.assert_array_equal(data.train, train)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STABILITY_LAB_CACHE": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/stability_lab"),
        ({}, "home/.cache/stability_lab"),
    ],
)
def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("STABILITY_LAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert cache_dir() == tmp_path / expected
    assert cache_dir().is_dir()


def test_unwritable_cache_falls_back_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        folder = cache_dir()
        assert cache_dir() == folder  # one folder a process
    assert [record.name for record in caplog.records] == ["stability_lab"]
    assert str(tmp_path / "file" / "cache") in caplog.text
    assert Words().load(ByteTokenizer()).train_tokens > 0
    assert any(folder.iterdir())


def test_sotu_begins_with_the_earliest_years() -> None:
    data = Sotu().load(ByteTokenizer())
    assert (data.train_tokens, data.val_tokens) == (11_521_039, 664_961)
    assert data.val_bytes == 664_961 - 13
    first = ByteTokenizer().decode(np.asarray(data.val)[:6704])
    assert first.startswith("Fellow-Citizens of the Senate and House of Representatives:")
    assert data.unigram_entropy < np.log(data.vocab_size)
