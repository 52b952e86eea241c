"""What holds for every tokenizer, and the byte tokenizer itself; test_bpe.py has what only byte pairs have."""

from pathlib import Path

import numpy as np
import pytest

from stability_lab.data.tokenizer import END_OF_DOCUMENT, Bpe, ByteTokenizer, Gpt2, Tokenizer

TEXTS = {
    "empty": "",
    "plain": "It was the best of times, it was the worst of times.",
    "unicode": "naïve € 你好 🙂 e\u0301 \u00a0\u00ad\u2028Ĳ",
    "controls": "\n\x00\r\n\t\x7f\x85",
    "spaces": " a  b   c\n\n   d \t\n ",
    "digits": "1 12 123 1234567 3.14e-10 ²³",
    "contractions": "I'm we'll he'd THEY'RE 'tis don''t",
    "special": f"a{END_OF_DOCUMENT}b <|endoftext|><|endoftext|> <|endoftext",
    "code": "def f(x):\n    return x[::-1] != '====' * 80  # ----",
    "long": "x" * 10_000,
}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = "the best of times, it was the worst of times\n" * 20
    return Bpe(270).fit([("a.txt", text.encode())], tmp_path_factory.mktemp("bpe") / "saved.json")


@pytest.fixture(params=["bytes", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    fixed = {"bytes": ByteTokenizer(), "gpt2": Gpt2()}
    return fixed.get(request.param) or request.getfixturevalue("bpe")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint16
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_bytes = tokenizer.token_bytes()
    assert token_bytes.shape == (tokenizer.vocab_size,)
    assert token_bytes.dtype == np.int64
    assert token_bytes[tokenizer.encode(text.encode())].sum() == len(text.encode())


def test_only_the_document_end_stands_for_no_text(tokenizer: Tokenizer) -> None:
    np.testing.assert_array_equal(np.flatnonzero(tokenizer.token_bytes() == 0), [tokenizer.eos_id])
    assert tokenizer.eos_id == tokenizer.vocab_size - 1


def test_the_name_of_the_special_token_is_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(END_OF_DOCUMENT.encode())
    assert tokenizer.eos_id not in ids
    assert len(ids) > 1


def test_every_byte_has_an_id_of_its_own(tokenizer: Tokenizer) -> None:
    """So no text is out of the vocabulary, and no id stands for an unknown character."""
    text = "".join(map(chr, range(128))) + "\u0080\u07ff\u0800\uffff\U00010000\U0010ffff" + "\u00e9" * 3
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text
    singles = np.flatnonzero(tokenizer.token_bytes() == 1)
    assert len(singles) == 256
    decoded = {tokenizer.decode([i]) for i in singles.tolist()}
    assert decoded == {chr(i) for i in range(128)} | {"\ufffd"}


def test_decode_shows_document_ends_and_broken_text(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_id
    a, b = (int(tokenizer.encode(letter)[0]) for letter in (b"a", b"b"))
    assert tokenizer.decode([eos, a, eos, eos, b, eos]) == "<|endoftext|>a<|endoftext|><|endoftext|>b<|endoftext|>"
    assert tokenizer.decode([]) == ""
    # Half a character before a document's end must not swallow the end.
    singles = np.flatnonzero(tokenizer.token_bytes() == 1).tolist()
    half = next(i for i in singles if tokenizer.decode([i]) == "\ufffd")
    assert tokenizer.decode([half, eos, half]) == "\ufffd<|endoftext|>\ufffd"


@pytest.mark.parametrize("outside", [[-1], ["eos", 1], [0, 70000]])
def test_decode_refuses_other_ids(tokenizer: Tokenizer, outside: list[int | str]) -> None:
    ids = [tokenizer.eos_id + 1 if i == "eos" else int(i) for i in outside]
    with pytest.raises(ValueError, match=f"must lie from 0 to {tokenizer.eos_id}"):
        tokenizer.decode(ids)


def test_bytes_and_gpt2_learn_nothing(tmp_path: Path) -> None:
    for tokenizer in (ByteTokenizer(), Gpt2()):
        assert tokenizer.fit([("a.txt", b"text")], tmp_path / "saved.json") is tokenizer
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_their_own_ids() -> None:
    np.testing.assert_array_equal(ByteTokenizer().encode(bytes(range(256))), np.arange(256))
    assert (ByteTokenizer.vocab_size, ByteTokenizer.eos_id) == (257, 256)
    assert ByteTokenizer().decode([0xC3, 256, 0xA9]) == "\ufffd<|endoftext|>\ufffd"
