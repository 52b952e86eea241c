import importlib.metadata
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats

from stability_lab.data.sources.corpus import Documents, Sotu, TextFiles, corpus_hash
from stability_lab.data.tokenizer import Bpe, ByteTokenizer, Gpt2, Tokenizer, TokenizerOptions
from stability_lab.data.tokens import memmap as memmap_module
from stability_lab.data.tokens.memmap import cache_dir, load_tokens


@dataclass(frozen=True)
class Words:
    """Ten short documents."""

    name: ClassVar[str] = "words"
    val_every: int = 5

    def documents(self) -> Documents:
        return [(f"{i}.txt", b"abc" * (i + 1)) for i in range(10)]

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return {"name": self.name, "sha256": corpus_hash(documents or self.documents())}


@dataclass(frozen=True)
class Prose:
    """Thirty documents with more words, and characters of one to four bytes."""

    name: ClassVar[str] = "prose"
    val_every: int = 5
    year: int = 1800

    def documents(self) -> Documents:
        lines = (
            f"In the year {self.year + i} naïve 你好 🙂 <|endoftext|> of it's times\n" * (i % 7) for i in range(30)
        )
        return [(f"{i}.txt", line.encode()) for i, line in enumerate(lines)]

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return {"name": self.name, "sha256": corpus_hash(documents or self.documents())}


@dataclass(frozen=True)
class WideTokenizer:
    """A byte tokenizer whose ids start at 1,000 or higher."""

    vocab_size: int
    id = "wide-1"

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


def _refuse_to_build(*args: object) -> None:
    raise AssertionError("the cache entry was built again")


def _entry(cache: Path) -> Path:
    (entry,) = cache.iterdir()  # exactly one: no temporary folder is left behind
    return entry


def test_tokens_are_the_documents_with_their_ends() -> None:
    data = load_tokens(Words(), ByteTokenizer())
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
    assert data.corpus == Words().describe()


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Bpe(280), Gpt2()], ids=lambda tokenizer: tokenizer.id)
def test_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: TokenizerOptions) -> None:
    """So bits per byte means the same for every tokenizer: nothing is lost, and document ends count for nothing."""
    data = load_tokens(Prose(), tokenizer)
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
    load_tokens(Prose(), spy)
    ((documents, _),) = spy.calls
    assert documents == [document for i, document in enumerate(Prose().documents()) if i % 5]


def test_vocabulary_is_kept_under_text_split_and_options(cache: Path) -> None:
    spies = [Spy() for _ in range(5)]
    spies[4].id = "other"
    for corpus, spy in zip([Prose(), Prose(), Prose(val_every=4), Prose(year=1900), Prose()], spies, strict=True):
        load_tokens(corpus, spy)
    paths = [spy.calls[0][1] for spy in spies]
    assert {path.parent for path in paths} == {cache}
    assert paths[0] == paths[1]
    assert len(set(paths)) == 4


def test_a_learned_vocabulary_is_cached_beside_its_tokens(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = load_tokens(Prose(), Bpe(280))
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == sorted([first.fingerprint[:32], "vocabulary"])
    monkeypatch.setattr(memmap_module, "_build_entry", _refuse_to_build)
    monkeypatch.setattr(Bpe, "_train", _refuse_to_build)
    second = load_tokens(Prose(), Bpe(280))
    np.testing.assert_array_equal(first.val, second.val)
    np.testing.assert_array_equal(first.token_bytes, second.token_bytes)
    assert first.fingerprint == second.fingerprint
    assert (second.vocab_size, second.eos_id) == (280, 279)


def test_another_version_of_the_library_learns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokens(Prose(), Bpe(280))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.0")
    second = load_tokens(Prose(), Bpe(280))
    assert first.fingerprint != second.fingerprint
    np.testing.assert_array_equal(first.val, second.val)


def test_lost_vocabulary_is_learned_again_and_fits_the_tokens(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = load_tokens(Prose(), Bpe(280))
    (vocabulary,) = cache.glob("vocabulary-*")
    vocabulary.write_text("{")
    monkeypatch.setattr(memmap_module, "_build_entry", _refuse_to_build)
    assert load_tokens(Prose(), Bpe(280)).fingerprint == first.fingerprint


def test_maps_are_read_only_and_small() -> None:
    data = load_tokens(Words(), ByteTokenizer())
    assert isinstance(data.train, np.memmap)
    assert data.train.dtype == data.val.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        data.train[0] = 1


def test_unigram_entropy_matches_scipy() -> None:
    data = load_tokens(Words(), ByteTokenizer())
    _, counts = np.unique(data.train, return_counts=True)
    assert data.unigram_entropy == pytest.approx(scipy.stats.entropy(counts), abs=1e-12)
    # Closed form: three letters equally often and 8 document ends.
    n = data.train_tokens
    letter, end = (n - 8) / 3 / n, 8 / n
    assert data.unigram_entropy == pytest.approx(-3 * letter * np.log(letter) - end * np.log(end), abs=1e-12)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32), (200_000, np.uint32)])
def test_wide_vocabularies_use_four_bytes(vocab_size: int, dtype: type) -> None:
    tokenizer = WideTokenizer(vocab_size)
    data = load_tokens(Words(), tokenizer)
    assert data.train.dtype == dtype
    text = Words().documents()[0][1]
    np.testing.assert_array_equal(data.val[: len(text)], tokenizer.encode(text))
    assert np.asarray(data.val)[len(text)] == vocab_size - 1


def test_second_load_reads_the_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = load_tokens(Words(), ByteTokenizer())
    assert sorted(p.name for p in _entry(cache).iterdir()) == ["meta.json", "train.bin", "val.bin"]
    monkeypatch.setattr(memmap_module, "_build_entry", _refuse_to_build)
    second = load_tokens(Words(), ByteTokenizer())
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
        load_tokens(corpus, tokenizer).fingerprint
        for corpus in (Prose(), Prose(val_every=4), Words(), TextFiles(path=str(tmp_path / "a.txt")))
        for tokenizer in (ByteTokenizer(), WideTokenizer(65_536), Bpe(257), Bpe(258), Gpt2())
    }
    assert len(fingerprints) == 20


def _truncate(entry: Path) -> None:
    path = entry / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])


def _edit_meta(**changes: object) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        path = entry / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda entry: (entry / "val.bin").unlink(),
        lambda entry: (entry / "val.bin").write_bytes(b""),
        lambda entry: (entry / "meta.json").write_text('{"format": 1'),
        lambda entry: (entry / "meta.json").write_text("[]"),
        lambda entry: (entry / "meta.json").write_text("{}"),
        lambda entry: (entry / "meta.json").write_bytes(b"\xff\xfe"),
        _edit_meta(corpus_sha256="0"),
        _edit_meta(dtype="no such type"),
        _edit_meta(val_bytes=None),
    ],
)
def test_damaged_entry_is_built_again(
    monkeypatch: pytest.MonkeyPatch, cache: Path, damage: Callable[[Path], object]
) -> None:
    data = load_tokens(Words(), ByteTokenizer())
    # Copies: reading a map of a file that was cut short kills the process.
    train, val = np.array(data.train), np.array(data.val)
    damage(_entry(cache))
    repaired = load_tokens(Words(), ByteTokenizer())
    np.testing.assert_array_equal(repaired.train, train)
    np.testing.assert_array_equal(repaired.val, val)
    assert repaired.unigram_entropy == data.unigram_entropy
    _entry(cache)
    monkeypatch.setattr(memmap_module, "_build_entry", _refuse_to_build)
    assert load_tokens(Words(), ByteTokenizer()).train_tokens == len(train)


def test_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(self: ByteTokenizer, data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(Words(), ByteTokenizer())
    assert list(cache.iterdir()) == []


def test_entry_made_by_another_process_meanwhile_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    publish, seen = memmap_module._publish, []

    def publish_late(temporary: Path, entry: Path, key: dict[str, object]) -> None:
        if not seen:
            seen.append(entry)
            load_tokens(Words(), ByteTokenizer())  # the other process is faster
            seen.append((entry / "meta.json").stat().st_ino)
        publish(temporary, entry, key)

    monkeypatch.setattr(memmap_module, "_publish", publish_late)
    data = load_tokens(Words(), ByteTokenizer())
    assert (_entry(cache) / "meta.json").stat().st_ino == seen[1]
    assert np.asarray(data.train)[0] == ord("a")
    assert np.asarray(data.train)[-1] == 256


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
    assert load_tokens(Words(), ByteTokenizer()).train_tokens > 0
    assert any(folder.iterdir())


def test_sotu_begins_with_the_earliest_years() -> None:
    data = load_tokens(Sotu(), ByteTokenizer())
    assert (data.train_tokens, data.val_tokens) == (11_521_039, 664_961)
    assert data.val_bytes == 664_961 - 13
    first = ByteTokenizer().decode(np.asarray(data.val)[:6704])
    assert first.startswith("Fellow-Citizens of the Senate and House of Representatives:")
    assert data.unigram_entropy < np.log(data.vocab_size)
