"""Tokenise text of any size once, with several processes, into the folder that `prepared.py` reads.

The parent reads documents in order and hands out chunks of them, workers encode, and the parent writes the results in
order: the bytes do not depend on the number of workers. Whenever a shard is full, it and the state of the work are
made durable, and an interrupted call continues there. Memory holds a few chunks, whatever the size of the text.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.repeats import repetitive
from stability_lab.data.source import Document, Documents, TextSource, TokenData
from stability_lab.data.tokenizer import Bpe, Tokenizer, TokenizerOptions
from stability_lab.data.tokens.memmap import cache_dir, ids_dtype
from stability_lab.data.tokens.prepared import (
    FORMAT,
    PROGRESS,
    SIDECAR,
    SPLITS,
    VOCABULARY,
    is_prepared,
    is_unfinished,
    open_prepared,
    read_sidecar,
    regions,
)
from stability_lab.data.tokens.scan import scan
from stability_lab.disk.files import read_text, replace_file
from stability_lab.disk.lock import Held, Lock, acquire

SHARD_TOKENS = 10**8
CHUNK_BYTES, CHUNK_DOCUMENTS = 2**20, 1024
LEARN_FROM_BYTES = 2**26
"""Text from the start of the training split that a vocabulary is learned from."""


class Encoded(NamedTuple):
    """A document; `ids` None where the filter dropped it."""

    ids: npt.NDArray[np.integer] | None
    text_bytes: int
    sha256: bytes


def load_prepared(source: TextSource, tokenizer: TokenizerOptions) -> TokenData:
    """The tokens of `source` from `default_folder`, where they are made now if they are not there."""
    folder = default_folder(source, tokenizer)
    prepare(source, tokenizer, folder)
    return open_prepared(folder, tokenizer)


def default_folder(source: TextSource, tokenizer: TokenizerOptions) -> Path:
    """Where training looks for the tokens of a source that is too large for memory."""
    key = json.dumps(_key(source, tokenizer, ngram_filter=False, shard_tokens=SHARD_TOKENS), sort_keys=True)
    return cache_dir() / f"prepared-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def prepare(
    source: TextSource,
    tokenizer: TokenizerOptions,
    folder: Path,
    *,
    workers: int = 1,
    ngram_filter: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """The sidecar of the finished folder; at once where it is finished already.

    ConfigError where the folder holds something else, another process is at work in it or the text does not do.
    """
    key = _key(source, tokenizer, ngram_filter, shard_tokens)
    if is_prepared(folder):
        meta = read_sidecar(folder)
        if meta["key"] != key:
            raise ConfigError(f"{folder} holds other tokens ({_difference(meta['key'], key)}); give another --out")
        return meta
    if folder.is_dir() and not is_unfinished(folder) and any(folder.iterdir()):
        raise ConfigError(f"{folder} is no unfinished preparation and not empty; give another --out")
    lock = _locked(folder)
    try:
        state = _resumed(folder, key)
        fitted = _fit(source, tokenizer, folder)
        with _Writer(source, folder, state, ids_dtype(fitted.vocab_size), shard_tokens) as writer:
            for documents in _encode_all(_chunks(source.iterate(state["read"])), fitted, ngram_filter, workers):
                writer.add(documents)
            return writer.finish(fitted)
    finally:
        if not (folder / SIDECAR).exists() and not (folder / PROGRESS).exists():  # nothing to go on from
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _locked(folder: Path) -> Lock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return acquire(folder)
    except Held as error:
        raise ConfigError(f"{folder} is being prepared by {error}; wait for it") from error
    except OSError as error:  # it, or what it is to lie in, is a file, or may not be written
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); give another --out") from error


def _key(source: TextSource, tokenizer: TokenizerOptions, ngram_filter: bool, shard_tokens: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": {"name": source.about()["name"], "identity": source.identity()},
        "tokenizer": tokenizer.id,
        "ngram_filter": ngram_filter,
        "shard_tokens": shard_tokens,
    }


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    differ = [name for name in new if old.get(name) != new[name]]
    return ", ".join(f"{name} {json.dumps(old.get(name)):.60}, asked {json.dumps(new[name]):.60}" for name in differ)


def _resumed(folder: Path, key: dict[str, Any]) -> dict[str, Any]:
    """What is known after the last complete shard. `chain` is a hash over the hashes of all documents so far."""
    try:
        saved = json.loads(read_text(folder / PROGRESS))
    except (OSError, ValueError):
        split = {"tokens": 0, "documents": 0, "text_bytes": 0, "largest_id": -1}
        splits = {name: {"shards": [], **split} for name in SPLITS}
        return {"key": key, "read": 0, "dropped": 0, "chain": "", "splits": splits}
    if saved["key"] != key:
        raise ConfigError(
            f"{folder} holds the beginning of other tokens ({_difference(saved['key'], key)}); delete it, or give "
            "another --out"
        )
    return saved


def _fit(source: TextSource, tokenizer: TokenizerOptions, folder: Path) -> Tokenizer:
    documents: Documents = []
    if isinstance(tokenizer, Bpe) and not (folder / VOCABULARY).exists():
        size = 0
        for i, document in enumerate(source.iterate()):
            if not source.holds_out(i):
                documents.append(document)
                size += len(document[1])
                if size >= LEARN_FROM_BYTES:
                    break
    return tokenizer.fit(documents, folder / VOCABULARY)


def _chunks(documents: Iterator[Document]) -> Iterator[Documents]:
    """Consecutive documents, about a mebibyte at a time."""
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[1])
        if size >= CHUNK_BYTES or len(chunk) == CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode(documents: Documents, tokenizer: Tokenizer, ngram_filter: bool) -> list[Encoded]:
    """Each document with its end-of-document id."""
    dtype, encoded = ids_dtype(tokenizer.vocab_size), []
    for name, text in documents:
        ids = tokenizer.encode(text)
        drop = ngram_filter and repetitive(ids[None])[0]
        digest = hashlib.sha256(name.encode() + b"\0" + text).digest()
        encoded.append(Encoded(None if drop else np.append(ids, tokenizer.eos_id).astype(dtype), len(text), digest))
    return encoded


_tokenizer: Tokenizer | None = None  # of a worker process


def _start_worker(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, and they would wait for it for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: Documents, ngram_filter: bool) -> list[Encoded]:
    assert _tokenizer is not None
    return encode(chunk, _tokenizer, ngram_filter)


def _encode_all(
    chunks: Iterator[Documents], tokenizer: Tokenizer, ngram_filter: bool, workers: int
) -> Iterator[list[Encoded]]:
    """Encode in order; at most two chunks a worker are under way, so that a fast reader does not fill the memory."""
    if workers == 1:
        yield from (encode(chunk, tokenizer, ngram_filter) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,)) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk, ngram_filter))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Shard:
    """A shard that is being written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.bin"
        self.file = self.path.with_suffix(".part").open("wb")
        self.sha256 = hashlib.sha256()
        self.starts: list[int] = []
        self.tokens = 0

    def add(self, ids: npt.NDArray[np.integer]) -> None:
        data = ids.tobytes()
        self.file.write(data)
        self.sha256.update(data)
        self.starts.append(self.tokens)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Make it durable; its entry in the sidecar."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        documents = self.path.with_suffix(".docs.npy")
        np.save(documents, np.array(self.starts, dtype=np.int64))
        Path(self.file.name).replace(self.path)
        return {
            "file": self.path.name,
            "documents_file": documents.name,
            "tokens": self.tokens,
            "documents": len(self.starts),
            "sha256": self.sha256.hexdigest(),
        }


class _Writer:
    """Appends documents to the shards of both splits; what it saves moves on only when both are on the disk."""

    def __init__(
        self, source: TextSource, folder: Path, state: dict[str, Any], dtype: np.dtype, shard_tokens: int
    ) -> None:
        from tqdm import tqdm

        self.source, self.folder, self.state, self.dtype, self.shard_tokens = source, folder, state, dtype, shard_tokens
        self.splits: dict[str, dict[str, Any]] = state["splits"]
        self.shards = self._begin()
        # A progress bar where there is a terminal (disable=None).
        self.bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024, disable=None, desc="tokenising")
        self.bar.update(self._text_bytes())

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        for shard in self.shards.values():
            shard.file.close()

    def _text_bytes(self) -> int:
        return sum(split["text_bytes"] for split in self.splits.values())

    def _begin(self) -> dict[str, _Shard]:
        return {name: _Shard(self.folder, f"{name}-{len(split['shards']):05d}") for name, split in self.splits.items()}

    def add(self, documents: Iterable[Encoded]) -> None:
        for document in documents:
            name = "val" if self.source.holds_out(self.state["read"]) else "train"
            self.state["read"] += 1
            self.state["chain"] = hashlib.sha256(bytes.fromhex(self.state["chain"]) + document.sha256).hexdigest()
            self.bar.update(document.text_bytes)
            if document.ids is None:
                self.state["dropped"] += 1
                continue
            split, shard = self.splits[name], self.shards[name]
            shard.add(document.ids)
            split["documents"] += 1
            split["text_bytes"] += document.text_bytes
            split["largest_id"] = max(split["largest_id"], int(document.ids.max()))
            if shard.tokens >= self.shard_tokens:
                self._commit()
                self.shards = self._begin()

    def _commit(self) -> None:
        for name, split in self.splits.items():
            split["tokens"] += self.shards[name].tokens
            split["shards"].append(self.shards[name].close())
        replace_file(self.folder / PROGRESS, json.dumps(self.state))

    def finish(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Writes the sidecar, which makes the folder a finished one, and clears what only the work needed."""
        state, splits, folder = self.state, self.splits, self.folder
        if any(shard.tokens for shard in self.shards.values()) or not splits["train"]["shards"]:
            self._commit()
        for name, side in zip(SPLITS, ("training", "validation"), strict=True):
            if not splits[name]["tokens"]:
                (folder / PROGRESS).unlink()
                raise ConfigError(
                    f"data={self.source.about()['name']}: nothing is left for the {side} split of {state['read']} "
                    f"documents, {state['dropped']} of which the filter dropped; give more text"
                )
        hashes = [shard["sha256"] for name in SPLITS for shard in splits[name]["shards"]]
        # Training would read all ids before its first step; after this the cache knows them.
        train = regions(folder, {"dtype": self.dtype, **splits}, "train")
        corpus = {"sha256": state["chain"], "documents": state["read"], "bytes": self._text_bytes()}
        meta = {
            "format": FORMAT,
            "key": state["key"],
            "dtype": self.dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "tokenizer": tokenizer.id,
            "fingerprint": hashlib.sha256("".join(hashes).encode()).hexdigest(),
            "unigram_entropy": scan(train, tokenizer.vocab_size).unigram_entropy,
            "dropped_documents": state["dropped"],
            "corpus": {**self.source.about(), **corpus},
            **splits,
        }
        replace_file(folder / SIDECAR, json.dumps(meta, indent=2) + "\n")
        (folder / PROGRESS).unlink()
        # Calls that were killed left what they were writing, and one of an earlier version its counts.
        for left in (path for pattern in ("*.part", "counts-*.npy", ".*.tmp") for path in folder.glob(pattern)):
            left.unlink()
        return meta
