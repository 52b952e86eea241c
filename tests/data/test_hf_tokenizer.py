"""Any tokenizer.json: the ids of the library, marks where documents end and begin, and bytes where they are known."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stability_lab.config import ConfigError
from stability_lab.data import hf_tokenizer as module
from stability_lab.data import tokenizer as tokenizer_module
from stability_lab.data.hf_tokenizer import HubTokenizer, HuggingFaceTokenizer, JsonTokenizer
from stability_lab.data.sources.token_files import TokenFiles
from stability_lab.data.tokenizer import Gpt2
from stability_lab.data.tokens.prepare import prepare
from stability_lab.data.tokens.prepared import open_prepared

TEXT = "In 1790 naïve 你好 🙂  of it's <|endoftext|> times\n\n\tx"


def gpt2_json() -> str:
    """GPT-2's own vocabulary as a tokenizer.json, with its end of a document as a special token."""
    backend = Tokenizer.from_str(tokenizer_module._gpt2()._backend.to_str())
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return backend.to_str()


def sentences_json() -> str:
    """As Llama 2's: words begin with U+2581, and bytes have tokens of their own."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "▁b": 4, "b": 5, "a": 6, "▁": 7}
    backend = Tokenizer(models.BPE(words, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Replace("▁", " ")  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return backend.to_str()


def written(folder: Path, text: str) -> str:
    path = folder / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def fit(folder: Path, text: str, **options: str) -> HuggingFaceTokenizer:
    return JsonTokenizer(written(folder, text), **options).fit([], folder)


def test_gpt2_from_a_file_is_gpt2(tmp_path: Path) -> None:
    ours, theirs = fit(tmp_path, gpt2_json()), Gpt2()
    np.testing.assert_array_equal(ours.encode(TEXT.encode()), theirs.encode(TEXT.encode()))
    assert (ours.vocab_size, ours.eos_id) == (50_257, 50_256)
    np.testing.assert_array_equal(ours.token_bytes(), theirs.token_bytes())
    assert ours.decode(ours.encode(TEXT.encode())) == TEXT
    assert ours.decode([15496, 995, 50_256]) == "Hello world<|endoftext|>"
    assert ours.encode(b"x").dtype == np.uint16


def test_special_tokens_in_the_text_are_text(tmp_path: Path) -> None:
    tokenizer = fit(tmp_path, gpt2_json())
    assert 50_256 not in tokenizer.encode(b"a<|endoftext|>b")
    assert tokenizer.token_bytes()[tokenizer.encode(b"a<|endoftext|>b")].sum() == 15


def test_a_document_may_have_a_beginning(tmp_path: Path) -> None:
    tokenizer = fit(tmp_path, sentences_json(), bos_token="<s>")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (2, 8)
    assert tokenizer.encode(b" a b").tolist() == [1, 3, 4]
    assert tokenizer.encode(b"").tolist() == [1]
    plain = fit(tmp_path, sentences_json())
    assert plain.encode(b" a b").tolist() == [3, 4]
    assert plain.id != tokenizer.id


def test_bytes_of_tokens_that_are_no_bytes_are_unknown(tmp_path: Path) -> None:
    tokenizer = fit(tmp_path, sentences_json())
    assert len(tokenizer.token_bytes()) == 0
    assert tokenizer.decode([3, 4, 2]) == " a b</s>"
    with pytest.raises(ValueError, match="ids from 3 to 8: must lie from 0 to 7"):
        tokenizer.decode([3, 8])


def test_workers_get_an_equal_one(tmp_path: Path) -> None:
    tokenizer = fit(tmp_path, gpt2_json())
    other = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(other.encode(TEXT.encode()), tokenizer.encode(TEXT.encode()))
    assert 50_256 not in other.encode(b"a<|endoftext|>b")


def test_the_file_and_the_hub_are_the_same_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_fetch", lambda name, revision: gpt2_json())
    assert HubTokenizer("gpt2").fit([], tmp_path).id == fit(tmp_path, gpt2_json()).id
    assert HubTokenizer("gpt2").id != HubTokenizer("gpt2", revision="v1").id


def test_prepared_ids_know_their_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABILITY_LAB_CACHE", str(tmp_path / "cache"))
    from stability_lab.data.sources.corpus import TextFiles

    (tmp_path / "x.txt").write_text("some words of text\n" * 500)
    options = JsonTokenizer(written(tmp_path, gpt2_json()))
    prepare(TextFiles(path=str(tmp_path / "x.txt")), options, tmp_path / "out")
    assert open_prepared(tmp_path / "out", options).vocab_size == 50_257
    other = JsonTokenizer(written(tmp_path, sentences_json()))
    with pytest.raises(ConfigError, match="was prepared with the tokenizer json-1-"):
        TokenFiles(path=str(tmp_path / "out")).load(other)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{}", {}, r"tokenizer\.path=.*: is no tokenizer\.json"),
        (sentences_json(), {"eos_token": "<end>"}, r"tokenizer\.eos_token=<end>: the vocabulary has no such token"),
        (sentences_json(), {"bos_token": "<bos>"}, r"tokenizer\.bos_token=<bos>: the vocabulary has no such token"),
        (Tokenizer(models.BPE({"a": 0}, [])).to_str(), {}, r"tokenizer\.eos_token=null: name the token .* has none of"),
        (
            Tokenizer(models.BPE({"</s>": 0, "<eos>": 1}, [])).to_str(),
            {},
            r"tokenizer\.eos_token=null: .*\(it has </s> and <eos>\)",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, text, **options)


def test_a_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    for name in ("none.json", "", "fifo.json"):
        with pytest.raises(ConfigError, match=r"tokenizer\.path=.*cannot be read"):
            JsonTokenizer(str(tmp_path / name)).fit([], tmp_path)


def test_lower_case_counts_the_text_that_is_encoded(tmp_path: Path) -> None:
    """Text is normalised before it is cut, so bytes are those of the normalised text."""
    backend = Tokenizer.from_str(gpt2_json())
    backend.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = fit(tmp_path, backend.to_str())
    ids = tokenizer.encode("ÀÉ THE".encode())
    assert tokenizer.token_bytes()[ids].sum() == len("àé the".encode())
