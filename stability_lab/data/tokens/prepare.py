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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.repeats import repetitive
from stability_lab.data.sources.corpus import Documents, TextSource
from stability_lab.data.sources.text_files import Document
from stability_lab.data.tokenizer import Bpe, Tokenizer, TokenizerOptions
from stability_lab.data.tokens.memmap import cache_dir, entropy, ids_dtype
from stability_lab.data.tokens.prepared import (
    FORMAT,
    PROGRESS,
    SIDECAR,
    SPLITS,
    VOCABULARY,
    is_prepared,
    is_unfinished,
    read_sidecar,
)
from stability_lab.disk.files import replace_file
from stability_lab.disk.lock import Held, Lock, acquire

SHARD_TOKENS = 10**8
CHUNK_BYTES, CHUNK_DOCUMENTS = 2**20, 1024
LEARN_FROM_BYTES = 2**26
"""Text from the start of the training split that a vocabulary is learned from."""


class Encoded(NamedTuple):
    """A document in its split; `ids` None where the filter dropped it."""

    split: str
    ids: npt.NDArray[np.integer] | None
    text_bytes: int
    sha256: bytes


@dataclass
class _Split:
    """What is known of a split so far. `shards` are those that are complete."""

    shards: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    largest_id: int = -1


@dataclass
class _State:
    """Where the work is after a complete shard. `chain` is a hash over the hashes of all documents so far."""

    key: dict[str, Any]
    read: int = 0
    dropped: int = 0
    chain: str = ""
    splits: dict[str, _Split] = field(default_factory=lambda: {name: _Split() for name in SPLITS})
    counts: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "splits": {name: vars(split) for name, split in self.splits.items()}}


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # it, or what it is to lie in, is a file, or may not be written
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); give another --out") from error
    lock = _locked(folder)
    try:
        return _tokenise(source, tokenizer, folder, _resume(folder, key), workers, ngram_filter, shard_tokens)
    except BaseException:
        if not (folder / PROGRESS).exists():  # nothing to go on from
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


def _tokenise(
    source: TextSource,
    tokenizer: TokenizerOptions,
    folder: Path,
    state: _State,
    workers: int,
    ngram_filter: bool,
    shard_tokens: int,
) -> dict[str, Any]:
    fitted = _fit(source, tokenizer, folder)
    with _Writer(folder, state, fitted.vocab_size, shard_tokens) as writer, _bar(state) as bar:
        for documents in _encode_all(_chunks(source, state.read), fitted, ngram_filter, workers):
            for document in documents:
                writer.add(document)
            bar.update(sum(document.text_bytes for document in documents))
        return writer.finish(source, fitted)


def _key(source: TextSource, tokenizer: TokenizerOptions, ngram_filter: bool, shard_tokens: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": {"name": source.about()["name"], "identity": source.identity()},
        "tokenizer": tokenizer.id,
        "ngram_filter": ngram_filter,
        "shard_tokens": shard_tokens,
    }


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {_short(old.get(name))}, asked {_short(new[name])}" for name in new if old.get(name) != new[name]
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _locked(folder: Path) -> Lock:
    try:
        return acquire(folder)
    except Held as error:
        raise ConfigError(f"{folder} is being prepared by {error}; wait for it") from error


def _resume(folder: Path, key: dict[str, Any]) -> _State:
    try:
        saved = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _State(key)
    if saved["key"] != key:
        raise ConfigError(
            f"{folder} holds the beginning of other tokens ({_difference(saved['key'], key)}); delete it, or give "
            "another --out"
        )
    saved["splits"] = {name: _Split(**split) for name, split in saved["splits"].items()}
    return _State(**saved)


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


def _chunks(source: TextSource, skip: int) -> Iterator[list[tuple[str, Document]]]:
    """Consecutive documents with their split, about a mebibyte at a time."""
    chunk: list[tuple[str, Document]] = []
    size = 0
    for number, document in enumerate(source.iterate(skip), start=skip):
        chunk.append(("val" if source.holds_out(number) else "train", document))
        size += len(document[1])
        if size >= CHUNK_BYTES or len(chunk) == CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode(chunk: Iterable[tuple[str, Document]], tokenizer: Tokenizer, ngram_filter: bool) -> list[Encoded]:
    """Each document with its end-of-document id."""
    dtype, encoded = ids_dtype(tokenizer.vocab_size), []
    for split, (name, text) in chunk:
        ids = tokenizer.encode(text)
        drop = ngram_filter and repetitive(ids[None])[0]
        digest = hashlib.sha256(name.encode() + b"\0" + text).digest()
        ended = None if drop else np.append(ids, tokenizer.eos_id).astype(dtype)
        encoded.append(Encoded(split, ended, len(text), digest))
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


def _work(chunk: list[tuple[str, Document]], ngram_filter: bool) -> list[Encoded]:
    assert _tokenizer is not None
    return encode(chunk, _tokenizer, ngram_filter)


def _encode_all(
    chunks: Iterator[list[tuple[str, Document]]], tokenizer: Tokenizer, ngram_filter: bool, workers: int
) -> Iterator[list[Encoded]]:
    """In order; at most two chunks a worker are under way, so that a fast reader does not fill the memory."""
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


class _Writer:
    """Appends documents to the shards of both splits; `state` moves on only when both are complete on the disk."""

    def __init__(self, folder: Path, state: _State, vocab_size: int, shard_tokens: int) -> None:
        self.folder, self.state, self.shard_tokens = folder, state, shard_tokens
        self.dtype = ids_dtype(vocab_size)
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        if state.counts is not None:
            self.counts = np.load(folder / state.counts, allow_pickle=False)
        self._begin()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    def _begin(self) -> None:
        self.files = {split: self._path(split, "bin").with_suffix(".part").open("wb") for split in SPLITS}
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        self.starts: dict[str, list[int]] = {split: [] for split in SPLITS}
        self.written: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def _path(self, split: str, suffix: str) -> Path:
        return self.folder / f"{split}-{len(self.state.splits[split].shards):05d}.{suffix}"

    def add(self, document: Encoded) -> None:
        state, split = self.state, self.state.splits[document.split]
        state.read += 1
        state.chain = hashlib.sha256(bytes.fromhex(state.chain) + document.sha256).hexdigest()
        if document.ids is None:
            state.dropped += 1
            return
        data = document.ids.tobytes()
        self.files[document.split].write(data)
        self.hashes[document.split].update(data)
        self.starts[document.split].append(self.written[document.split])
        self.written[document.split] += len(document.ids)
        split.documents += 1
        split.text_bytes += document.text_bytes
        split.largest_id = max(split.largest_id, int(document.ids.max()))
        if document.split == "train":
            # Sorted rather than counted into the whole vocabulary: a document is short.
            ids, counts = np.unique(document.ids, return_counts=True)
            self.counts[ids] += counts
        if self.written[document.split] >= self.shard_tokens:
            self._commit()
            self._begin()

    def _commit(self) -> None:
        for split in SPLITS:
            self._close(split)
        counts, old = f"counts-{len(self.state.splits['train'].shards):05d}.npy", self.state.counts
        np.save(self.folder / counts, self.counts)
        self.state.counts = counts
        replace_file(self.folder / PROGRESS, json.dumps(self.state.as_dict()))
        if old is not None:
            (self.folder / old).unlink(missing_ok=True)

    def _close(self, split: str) -> None:
        known, file = self.state.splits[split], self.files[split]
        file.flush()
        os.fsync(file.fileno())
        file.close()
        path, documents = self._path(split, "bin"), self._path(split, "docs.npy")
        np.save(documents, np.array(self.starts[split], dtype=np.int64))
        Path(file.name).replace(path)
        known.tokens += self.written[split]
        known.shards.append(
            {
                "file": path.name,
                "documents_file": documents.name,
                "tokens": self.written[split],
                "documents": len(self.starts[split]),
                "sha256": self.hashes[split].hexdigest(),
            }
        )

    def finish(self, source: TextSource, tokenizer: Tokenizer) -> dict[str, Any]:
        """Writes the sidecar, which makes the folder a finished one, and clears what only the work needed."""
        state = self.state
        if any(self.written.values()) or not state.splits["train"].shards:
            self._commit()
        for split in SPLITS:
            if not state.splits[split].tokens:
                (self.folder / PROGRESS).unlink()
                side = "training" if split == "train" else "validation"
                raise ConfigError(
                    f"data={source.about()['name']}: nothing is left for the {side} split of {state.read} documents, "
                    f"{state.dropped} of which the filter dropped; give more text"
                )
        shards = [shard["sha256"] for split in SPLITS for shard in state.splits[split].shards]
        meta = {
            "format": FORMAT,
            "key": state.key,
            "dtype": self.dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "tokenizer": tokenizer.id,
            "fingerprint": hashlib.sha256("".join(shards).encode()).hexdigest(),
            "unigram_entropy": entropy(self.counts),
            "dropped_documents": state.dropped,
            "corpus": {
                **source.about(),
                "sha256": state.chain,
                "documents": state.read,
                "bytes": sum(split.text_bytes for split in state.splits.values()),
            },
            **{split: vars(state.splits[split]) for split in SPLITS},
        }
        replace_file(self.folder / SIDECAR, json.dumps(meta, indent=2) + "\n")
        (self.folder / PROGRESS).unlink()
        # Of earlier calls too: one that was killed leaves what it was writing.
        for pattern in ("*.part", "counts-*.npy", ".*.tmp"):
            for left in self.folder.glob(pattern):
                left.unlink()
        return meta


def _bar(state: _State) -> Any:
    """A progress bar where there is a terminal (disable=None)."""
    from tqdm import tqdm

    done = sum(split.text_bytes for split in state.splits.values())
    return tqdm(unit="B", unit_scale=True, unit_divisor=1024, initial=done, disable=None, desc="tokenising")
