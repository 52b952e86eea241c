"""Any tokenizer that the package `tokenizers` can read: `tokenizer=json` from a file, `tokenizer=hub` by name.

As with the others, special tokens are never read out of the text; they stand only where a document ends, or begins.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.network import hub_error, use_hub
from stability_lab.data.source import Documents
from stability_lab.data.tokenizer import Ids, tokenizers_library
from stability_lab.disk.files import read_text, why_unreadable

if TYPE_CHECKING:
    import tokenizers

SPECIAL = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
"""What encoders need."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""How the end of a document is commonly spelt; where a vocabulary has exactly one of them, it is that."""


class HuggingFaceTokenizer:
    """Ids as `backend` gives them, after the id of `bos_token` where that is given; `eos_token` ends a document."""

    def __init__(self, backend: tokenizers.Tokenizer, key: str, eos_token: str | None, bos_token: str | None) -> None:
        self._backend = backend
        backend.encode_special_tokens = True  # as text, that is
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _id(vocabulary, _end(vocabulary, eos_token, key), f"{key}.eos_token")
        self.special = {token: vocabulary[token] for token in SPECIAL if token in vocabulary}
        self._bos = None if bos_token is None else _id(vocabulary, bos_token, f"{key}.bos_token")
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        content = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.id = f"json-1-{content[:16]}-{self.eos_id}" + ("" if self._bos is None else f"-{self._bos}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, in a worker process, the setting that the library's pickle leaves out."""
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True

    def encode(self, data: bytes) -> npt.NDArray[np.uint16 | np.uint32]:
        """Raises UnicodeDecodeError for data that is not UTF-8."""
        (encoding,) = self._backend.encode_batch_fast([data.decode()], add_special_tokens=False)
        start = [] if self._bos is None else [self._bos]
        return np.array([*start, *encoding.ids], dtype=self._dtype)

    def decode(self, ids: Ids) -> str:
        """Decode as the tokenizer's own decoder does, with special tokens by their names."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}: must lie from 0 to {self.vocab_size - 1}")
        return self._backend.decode(ids.tolist(), skip_special_tokens=False)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text of each id where tokens are bytes (byte-level BPE); empty for other kinds, whose are not.

        The text is that after the tokenizer's normalisation; added tokens count as marks and not as text.
        """
        settings = json.loads(self._backend.to_str())
        if (settings.get("decoder") or {}).get("type") != "ByteLevel":
            return np.zeros(0, dtype=np.int64)
        one_byte = set(tokenizers_library().pre_tokenizers.ByteLevel.alphabet())
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._backend.get_vocab(with_added_tokens=False).items():
            counts[i] = sum(1 if character in one_byte else len(character.encode()) for character in token)
        for token in settings["added_tokens"]:
            counts[token["id"]] = 0
        return counts


@dataclass(frozen=True)
class JsonTokenizer:
    """A `tokenizer.json` file. `eos_token` null: the one usual end of a document that the vocabulary has."""

    path: str
    eos_token: str | None = None
    bos_token: str | None = None

    @property
    def id(self) -> str:
        content = hashlib.sha256(_read(self.path, "tokenizer.json").encode()).hexdigest()
        return f"json-1-{content}-{self.eos_token}-{self.bos_token}"

    def fit(self, documents: Documents, saved: Path) -> HuggingFaceTokenizer:
        text = _read(self.path, "tokenizer.json")
        return _from_text(text, f"tokenizer.path={self.path}", self.eos_token, self.bos_token)


@dataclass(frozen=True)
class WordPiece:
    """BERT's tokenizer with a vocabulary of your own: a `vocab.txt`, one token a line, [UNK] and [SEP] among them.

    Text is cleaned, split at spaces and signs and, if `lowercase`, freed of accents and capitals.
    """

    path: str
    lowercase: bool = True

    @property
    def id(self) -> str:
        return f"wordpiece-1-{hashlib.sha256(_read(self.path, 'vocab.txt').encode()).hexdigest()}-{self.lowercase}"

    def fit(self, documents: Documents, saved: Path) -> HuggingFaceTokenizer:
        tokens = _read(self.path, "vocab.txt").splitlines()
        for token in ("[UNK]", "[SEP]"):
            if token not in tokens:
                raise ConfigError(f"tokenizer.path={self.path}: the vocabulary has no {token}; name a BERT's vocab.txt")
        library = tokenizers_library()
        vocabulary = {token: i for i, token in enumerate(tokens)}
        backend = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.normalizer = library.normalizers.BertNormalizer(lowercase=self.lowercase)
        backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        backend.decoder = library.decoders.WordPiece()
        return HuggingFaceTokenizer(backend, "tokenizer", "[SEP]", None)


@dataclass(frozen=True)
class HubTokenizer:
    """The `tokenizer.json` of a model of the Hugging Face hub, from the hub's cache once it was fetched."""

    name: str
    revision: str = "main"
    eos_token: str | None = None
    bos_token: str | None = None

    @property
    def id(self) -> str:
        return f"hub-1-{self.name}-{self.revision}-{self.eos_token}-{self.bos_token}"

    def fit(self, documents: Documents, saved: Path) -> HuggingFaceTokenizer:
        key = f"tokenizer.name={self.name}"
        return _from_text(_fetch(self.name, self.revision), key, self.eos_token, self.bos_token)


def _read(path: str, kind: str) -> str:
    try:
        return read_text(Path(os.path.expanduser(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"tokenizer.path={path}: cannot be read ({reason}); name a {kind}") from error


@functools.cache
def _fetch(name: str, revision: str) -> str:
    online = use_hub()
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(name, "tokenizer.json", revision=revision, local_files_only=not online)
    except Exception as error:
        raise hub_error(f"tokenizer.name={name}", error, "tokenizer=gpt2 or tokenizer=bpe") from error
    return Path(path).read_text(encoding="utf-8")


def _from_text(text: str, key: str, eos_token: str | None, bos_token: str | None) -> HuggingFaceTokenizer:
    try:
        backend = tokenizers_library().Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        try:
            json.loads(text)
            why = "it is JSON of something else, or of another release of the package"
        except ValueError as fault:
            why = why_unreadable(fault)
        raise ConfigError(
            f"{key}: is no tokenizer.json of the package tokenizers ({why}); give the file that its `save` writes"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return HuggingFaceTokenizer(backend, "tokenizer", eos_token, bos_token)


def _end(vocabulary: dict[str, int], eos_token: str | None, key: str) -> str:
    if eos_token is not None:
        return eos_token
    known = [token for token in ENDS if token in vocabulary]
    if len(known) != 1:
        has = f"it has {' and '.join(known)}" if known else f"it has none of {', '.join(ENDS)}"
        raise ConfigError(f"{key}.eos_token=null: name the token that ends a document ({has})")
    return known[0]


def _id(vocabulary: dict[str, int], token: str, key: str) -> int:
    if token not in vocabulary:
        raise ConfigError(f"{key}={token}: the vocabulary has no such token")
    return vocabulary[token]
