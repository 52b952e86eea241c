"""Token cache: a corpus is encoded once, then memory-mapped by every run that uses it.

An entry is a folder with train.bin, val.bin and meta.json. It is written beside its final place and renamed,
so a reader never sees half of one, and two processes that build the same entry at once do no harm.
A vocabulary that is learned from the text is kept beside the entries, in a file of its own.
"""

import atexit
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stability_lab.data.sources.corpus import Corpus, Documents, split_documents
from stability_lab.data.tokenizer import Tokenizer, TokenizerOptions
from stability_lab.data.tokens.shards import Ids, Tokens, windows_of

FORMAT = 1
"""Part of the cache key: raise it when the files of an entry change."""

logger = logging.getLogger("stability_lab")


class TokenStream(Protocol):
    """Ids that come in one order only, such as those of a dataset that is read over the network."""

    @property
    def exact(self) -> bool:
        """Whether a saved state continues with exactly the ids that would have come."""
        ...

    def read(self, n: int) -> Ids:
        """The next n ids, shape (n,)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as JSON can hold it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, eq=False)
class TokenData:
    """A tokenized corpus. `train` and `val` are read-only memory maps of ids, shape (tokens,).

    `eos_id` marks where a document ends, or where it begins if `eos_first`; None where nothing does.
    `unigram_entropy` is in nats a token over the training split: the loss of knowing frequencies only.
    `entropy_rate` is that of a source that is known, in nats a token: in the long run no model does better.
    `val_surprisal`, shape (tokens,), is what each id of `val` costs a model that knows the source.
    `fingerprint` identifies corpus text, split and encoding; `corpus` is the corpus's own description.
    `token_bytes`, shape (vocab_size,), is how many bytes of text each id stands for (end of document: 0); empty
    where the ids have no known text. `val_bytes` is their sum over the validation split where it was counted.
    `notices` go to log and manifest. `tokenizer` decodes the ids where they have a text. `stream`, where given, opens
    for a data seed what training reads instead of `train`, which is then empty.
    """

    train: Tokens
    val: Tokens
    vocab_size: int
    eos_id: int | None
    unigram_entropy: float
    corpus: Mapping[str, str | int]
    fingerprint: str
    token_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    val_bytes: int = 0
    eos_first: bool = False
    entropy_rate: float | None = None
    val_surprisal: npt.NDArray[np.float64] | None = None
    tokenizer: Tokenizer | None = None
    notices: tuple[str, ...] = ()
    stream: Callable[[int], TokenStream] | None = None

    def optimal_loss(self, starts: Ids, seq_len: int) -> float | None:
        """What a model that knows the source scores on the validation windows at `starts`; None where nobody knows."""
        if self.val_surprisal is None:
            return None
        return float(windows_of(self.val_surprisal, seq_len)[starts + 1].mean())

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    def bytes_of(self, ids: npt.ArrayLike) -> int:
        """UTF-8 bytes of the text that ids of any shape stand for, the denominator of bits per byte; 0 if unknown."""
        return int(self.token_bytes[np.asarray(ids)].sum()) if len(self.token_bytes) else 0


def cache_dir() -> Path:
    """$STABILITY_LAB_CACHE, else $XDG_CACHE_HOME/stability_lab, else ~/.cache/stability_lab; made if missing.

    Where that cannot be written, a temporary folder that lives as long as the process, with a logged warning.
    """
    own, xdg = os.environ.get("STABILITY_LAB_CACHE"), os.environ.get("XDG_CACHE_HOME")
    wanted = Path(own) if own else Path(xdg or "~/.cache") / "stability_lab"
    try:
        folder = wanted.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return _temporary_cache(str(wanted), str(error))


def load_tokens(corpus: Corpus, tokenizer: TokenizerOptions) -> TokenData:
    """Tokens of a corpus, from the cache where it has a sound entry; otherwise encoded and cached.

    Each document is followed by the end-of-document id. Raises ConfigError where the corpus cannot be read or
    does not fit the tokenizer.
    """
    documents = corpus.documents()
    description = corpus.describe(documents)
    train, val = split_documents(documents, corpus.val_every)
    text = {"corpus_sha256": description["sha256"], "val_every": corpus.val_every}
    cache = cache_dir()
    fitted = tokenizer.fit(train, cache / f"vocabulary-{_hash(text | {'tokenizer': tokenizer.id})[:32]}.json")
    key = text | {"format": FORMAT, "tokenizer": fitted.id}
    fingerprint = _hash(key)
    entry = cache / fingerprint[:32]
    cached = _open_entry(entry, key) or _build_entry(entry, key, train, val, fitted)
    return TokenData(
        **cached._asdict(),
        vocab_size=fitted.vocab_size,
        eos_id=fitted.eos_id,
        corpus=description,
        fingerprint=fingerprint,
        token_bytes=fitted.token_bytes(),
        tokenizer=fitted,
    )


def ids_dtype(vocab_size: int) -> np.dtype:
    """Two bytes an id, or four where ids above 65,535 exist."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def entropy(counts: npt.NDArray[np.integer]) -> float:
    """Of the frequencies, in nats."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def _hash(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


class _Entry(NamedTuple):
    train: np.memmap
    val: np.memmap
    val_bytes: int
    unigram_entropy: float


@functools.cache
def _temporary_cache(wanted: str, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stability_lab-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("Cache folder %s cannot be written (%s); tokens go to %s.", wanted, reason, folder)
    return folder


def _open_entry(entry: Path, key: dict[str, Any]) -> _Entry | None:
    """None where there is no entry or it is damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if {name: meta[name] for name in key} != key:
            return None
        dtype = np.dtype(meta["dtype"])
        splits = []
        for split in ("train", "val"):
            path = entry / f"{split}.bin"
            if path.stat().st_size != meta[f"{split}_tokens"] * dtype.itemsize:
                return None
            splits.append(np.memmap(path, dtype=dtype, mode="r"))
        return _Entry(splits[0], splits[1], int(meta["val_bytes"]), float(meta["unigram_entropy"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _build_entry(entry: Path, key: dict[str, Any], train: Documents, val: Documents, tokenizer: Tokenizer) -> _Entry:
    temporary = entry.with_name(f"building-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        _write_entry(temporary, key, train, val, tokenizer)
        # Opened before the folder moves: whatever another process does to the entry, these maps stay valid.
        opened = _open_entry(temporary, key)
        assert opened is not None, f"{temporary}: the entry just written cannot be read"
        _publish(temporary, entry, key)
        return opened
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_entry(folder: Path, key: dict[str, Any], train: Documents, val: Documents, tokenizer: Tokenizer) -> None:
    dtype = ids_dtype(tokenizer.vocab_size)
    train_counts = _write_tokens(folder / "train.bin", train, tokenizer, dtype)
    val_counts = _write_tokens(folder / "val.bin", val, tokenizer, dtype)
    meta = key | {
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": int(train_counts.sum()),
        "val_tokens": int(val_counts.sum()),
        "val_bytes": sum(len(text) for _, text in val),
        "unigram_entropy": entropy(train_counts),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _write_tokens(path: Path, documents: Documents, tokenizer: Tokenizer, dtype: np.dtype) -> npt.NDArray[np.int64]:
    """Writes the ids and returns how often each occurs, shape (vocab_size,)."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with path.open("wb") as file:
        for _, text in documents:
            ids = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(dtype)
            counts += np.bincount(ids, minlength=len(counts))
            file.write(ids.tobytes())
    return counts


def _publish(temporary: Path, entry: Path, key: dict[str, Any]) -> None:
    """Moves a finished folder to its place, unless another process has put a sound one there."""
    damaged = entry.with_name(f"damaged-{uuid.uuid4().hex}")
    try:
        if entry.exists() and _open_entry(entry, key) is None:
            entry.rename(damaged)
        temporary.rename(entry)
    except OSError as error:
        if _open_entry(entry, key) is None:
            logger.warning("Tokens could not be cached in %s (%s).", entry, error)
    finally:
        shutil.rmtree(damaged, ignore_errors=True)
