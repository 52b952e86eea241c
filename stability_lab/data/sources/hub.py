"""`data=hub`: any text dataset of the Hugging Face hub, or local files through the same library.

Streamed, training reads documents one after the other while they arrive, and a checkpoint holds the place. Prepared,
the dataset is fetched once and tokenised to the disk (`prepare.py`), and every sample can be read at any time. In both
the first `val_documents` documents are the validation split.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.data.bad_files import checked_each
from stability_lab.data.network import commit_of, hub_error, use_hub
from stability_lab.data.source import Document, TextSource, TokenData
from stability_lab.data.tokenizer import Bpe, Tokenizer, TokenizerOptions
from stability_lab.data.tokens.memmap import cache_dir, entropy, ids_dtype
from stability_lab.data.tokens.prepare import load_prepared
from stability_lab.data.tokens.shards import Ids
from stability_lab.disk.content import HEAD, kind_of

INSTEAD = "data=text, data=sotu or data=synthetic"
LOCAL = ("arrow", "csv", "json", "parquet")
"""Names that mean a format of local files and no dataset of the hub."""
VAL_DOCUMENTS, LOCAL_VAL_EVERY = 1000, 20
"""Documents of the validation split unless `val_documents` says it; of local files at most one in `LOCAL_VAL_EVERY`."""
LEARN_FROM_DOCUMENTS = 20_000
"""Documents after the validation split that a streamed vocabulary is learned from."""
WHOLE_BYTES, SAMPLES, SAMPLE_BYTES = 2**26, 64, 2**20
"""Files up to this size are hashed whole, others at so many places, so many bytes at each."""

logger = logging.getLogger("stability_lab")


@dataclass(frozen=True)
class Hub(TextSource):
    """A dataset of the hub with a column of text; `name=json|parquet|csv|arrow` with `data_files` reads local files.

    `shuffle_buffer` documents are held to draw from; then a resumed run goes on only approximately, because the
    buffer is not saved. Rows without text are left out.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    data_files: str | None = None
    field: str = "text"
    streaming: bool = True
    shuffle_buffer: int = 0
    val_documents: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': must be a dataset of the hub, such as HuggingFaceFW/fineweb-edu")
        if (self.name in LOCAL) != (self.data_files is not None):
            raise ValueError(
                f"data_files={self.data_files or 'null'}: files, or a glob of them, go with data.name="
                f"{', '.join(LOCAL)}, and only with these"
            )
        if self.data_files is not None and self.split.partition("[")[0] != "train":
            raise ValueError(f"split={self.split}: must be train or a part of it, local files have no other")
        if self.shuffle_buffer < 0 or (self.shuffle_buffer and not self.streaming):
            raise ValueError(
                f"shuffle_buffer={self.shuffle_buffer}: must be 0 or more, and 0 with data.streaming=false, which "
                "draws every sample from all of the data"
            )
        if self.val_documents is not None and self.val_documents < 1:
            raise ValueError(f"val_documents={self.val_documents}: must be 1 or more, or null")

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        data = stream_tokens(self, tokenizer) if self.streaming else load_prepared(self, tokenizer)
        paths = self.files()
        if paths is None or 2 * data.val_bytes < sum(Path(path).stat().st_size for path in paths):
            return data
        notice = (
            f"data.data_files={self.data_files}: validation, the first documents, has half of the text or more "
            f"({data.val_bytes:,} bytes); data=text cuts a giant document and holds out pieces from all of it"
        )
        return replace(data, notices=(*data.notices, notice))

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        """Every document but the first `skip`, fetched to the disk first. Rows without text are left out."""
        texts = enumerate(self.texts(self.open(streaming=False)))
        named = ((f"{number:012d}", text) for number, text in texts if text.strip())
        return itertools.islice(named, skip, None)

    def holds_out(self, number: int) -> bool:
        return number < self.held_out

    @functools.cached_property
    def held_out(self) -> int:
        """Documents of the validation split. Where local files decide, the first 20,000 documents are counted."""
        if self.val_documents is not None or self.data_files is None:
            return self.val_documents or VAL_DOCUMENTS
        with self.errors():
            texts = (text for text in self.texts(self.open(streaming=True)) if text.strip())
            seen = sum(1 for _ in itertools.islice(texts, LOCAL_VAL_EVERY * VAL_DOCUMENTS))
        return max(1, seen // LOCAL_VAL_EVERY)

    def files(self) -> list[str] | None:
        """The files of a local dataset, sorted; ConfigError where there are none."""
        if self.data_files is None:
            return None
        found = sorted(glob.glob(os.path.expanduser(self.data_files), recursive=True))
        if not found:
            raise ConfigError(f"data.data_files={self.data_files}: no file matches (from {Path.cwd()})")
        checked_each([Path(path) for path in found], self._refuse_pointers)
        return found

    def _refuse_pointers(self, path: Path) -> None:
        with self.errors(), path.open("rb") as file:
            kind = kind_of(file.read(HEAD), path.stat().st_size)
        if kind is not None and kind.name == "pointer":
            raise ConfigError(f"data.data_files: {path} {kind.what}: {kind.todo}")

    def identity(self) -> dict[str, Any]:
        keys = ("config", "split", "revision", "field", "val_documents")
        stats = [(path, Path(path).stat()) for path in self.files() or []]
        return {key: getattr(self, key) for key in keys} | {"files": [[p, s.st_size, s.st_mtime_ns] for p, s in stats]}

    def content(self) -> str:
        """A hash that follows the bytes of local files, wherever they are, or the options of a `pinned` dataset."""
        files = [[Path(path).stat().st_size, content_hash(Path(path))] for path in self.files() or []]
        options = self if self.data_files is None else replace(self, data_files="")
        return hashlib.sha256(f"{options!r}{files}".encode()).hexdigest()

    def about(self) -> dict[str, str | int]:
        return {
            "name": self.name if self.config is None else f"{self.name}/{self.config}",
            "version": self.revision or "not pinned",
            "source": self.data_files or f"https://huggingface.co/datasets/{self.name}",
            "licence": "see its dataset card",
        }

    def pinned(self) -> Hub:
        """The same with the commit that its revision means now, where the hub or its cache tells."""
        known = None if self.data_files is not None else commit_of(self.name, self.revision)
        return replace(self, revision=known or self.revision)

    def open(self, streaming: bool) -> Any:
        """A `datasets.Dataset`, or an `IterableDataset`, of the text column; ConfigError where the library fails."""
        files = self.files()
        online = files is not None or use_hub()
        with self.errors():
            import datasets
            import datasets.config

            if not online:
                datasets.config.HF_HUB_OFFLINE = True
            datasets.disable_progress_bars()
            options = {"split": self.split, "revision": self.revision, "data_files": files, "streaming": streaming}
            dataset = datasets.load_dataset(self.name, self.config, **options)
        columns = dataset.column_names
        if columns is not None and self.field not in columns:
            raise ConfigError(f"data.field={self.field}: {self.name} has the columns {', '.join(columns)}")
        return dataset.select_columns([self.field])

    def texts(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
        """The text of each row, empty where it is null; ConfigError where it is no text."""
        for row in rows:
            text = row.get(self.field)
            if not isinstance(text, str | None):
                raise ConfigError(f"data.field={self.field}: {self.name} has no text there but {type(text).__name__}")
            yield b"" if text is None else text.encode(errors="replace")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """ConfigError for whatever the library raises."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise self.sentence(error) from error

    def sentence(self, error: Exception) -> ConfigError:
        """What to tell the user of an error of the library."""
        if isinstance(error, KeyError) and error.args == (self.field,):  # columns that only the first row shows
            return ConfigError(f"data.field={self.field}: {self.name} has no such column; name the one with text")
        if self.data_files is None:
            return hub_error(f"data.name={self.name}", error, INSTEAD)
        cause = error
        if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
            cause = error.__cause__  # the other one says only that there was one
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        return ConfigError(
            f"data.data_files={self.data_files}: cannot be read as data.name={self.name} ({reason.rstrip('.')}); mend "
            "the file, or name the format that it has"
        )


def content_hash(path: Path) -> str:
    """SHA-256 as hex: of the whole file, or of its size and `SAMPLES` stretches spread from its head to its tail.

    A change between two stretches that leaves the size as it is goes unseen. Parquet and gzip hardly allow one: what
    follows a changed page moves, and the tables of positions at the end with it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


class HubStream:
    """Ids of the documents after the validation split, one after the other and epoch after epoch."""

    def __init__(self, source: Hub, tokenizer: Tokenizer, data_seed: int) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._dataset = source.open(streaming=True).skip(source.held_out)
        if source.shuffle_buffer:
            self._dataset = self._dataset.shuffle(seed=data_seed % 2**63, buffer_size=source.shuffle_buffer)
        self._texts = source.texts(self._dataset)
        self._left: Ids = np.zeros(0, dtype=np.int64)
        self._epoch = self._of_epoch = 0  # of_epoch: rows read in this one
        self._has_text = False  # whether any of these was one

    @property
    def exact(self) -> bool:
        return self._source.shuffle_buffer == 0

    def read(self, n: int) -> Ids:
        """RuntimeError with one sentence where the hub or a file fails in the middle of training."""
        try:
            parts, missing = [self._left], n - len(self._left)
            while missing > 0:
                ids = self._tokenizer.encode(self._next())
                parts.append(np.append(ids, self._tokenizer.eos_id).astype(np.int64))
                missing -= len(parts[-1])
        except ConfigError:
            raise
        except Exception as error:
            # Without the library's own error, which a traceback would show, access tokens and all.
            raise RuntimeError(str(self._source.sentence(error))) from None
        ids = np.concatenate(parts)
        self._left = ids[n:]
        return ids[:n]

    def _next(self) -> bytes:
        while True:
            for text in self._texts:
                self._of_epoch += 1
                if text.strip():
                    self._has_text = True
                    return text
            if not self._has_text:
                raise _nothing_left(self._source)
            self._epoch, self._of_epoch, self._has_text = self._epoch + 1, 0, False
            name = self._source.name
            logger.info("%s is read to its end, and again from its beginning (epoch %d)", name, self._epoch)
            self._dataset.set_epoch(self._epoch)
            self._texts = self._source.texts(self._dataset)

    def state(self) -> dict[str, Any]:
        return {
            "dataset": self._dataset.state_dict() if self._of_epoch else None,
            "left": self._left.tolist(),
            "epoch": self._epoch,
            "of_epoch": self._of_epoch,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._left = np.array(state["left"], dtype=np.int64)
        self._epoch, self._of_epoch = state["epoch"], state["of_epoch"]
        self._has_text = self._of_epoch > 0
        self._dataset.set_epoch(self._epoch)
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._texts = self._source.texts(self._dataset)


def stream_tokens(source: Hub, tokenizer: TokenizerOptions) -> TokenData:
    """Validation ids in memory, and a stream for training; `unigram_entropy` is that of the validation ids."""
    source = source.pinned()
    return _stream_tokens(source, tokenizer, source.content())


@functools.lru_cache(maxsize=2)  # a command checks, then builds, each time from the same options
def _stream_tokens(source: Hub, tokenizer: TokenizerOptions, content: str) -> TokenData:
    dataset = source.open(streaming=True)
    with source.errors():
        texts = source.texts(dataset)
        documents = [text for text in itertools.islice(texts, source.held_out) if text.strip()]
        if not documents:
            raise ConfigError(
                f"data.val_documents={source.held_out}: the first {source.held_out} rows of {source.name}, split "
                f"{source.split}, hold no text for validation; give a larger number"
            )
        if not any(text.strip() for text in texts):
            raise _nothing_left(source)
        fitted = _fit(source, tokenizer, dataset, content)
    dtype = ids_dtype(fitted.vocab_size)
    val = np.concatenate([np.append(fitted.encode(text), fitted.eos_id).astype(dtype) for text in documents])
    digest = hashlib.sha256(val.tobytes()).hexdigest()
    notices = ()
    if source.shuffle_buffer:
        notices = (f"data.shuffle_buffer={source.shuffle_buffer}: a resumed run goes on approximately, not exactly",)
    return TokenData(
        train=np.zeros(0, dtype=dtype),
        val=val,
        vocab_size=fitted.vocab_size,
        eos_id=fitted.eos_id,
        unigram_entropy=entropy(np.bincount(val)),
        corpus=source.about() | {"sha256": f"of the validation split: {digest}", "streamed": "yes"},
        fingerprint=hashlib.sha256(f"{content}{fitted.id}{digest}".encode()).hexdigest(),
        token_bytes=fitted.token_bytes(),
        val_bytes=sum(len(text) for text in documents),
        tokenizer=fitted,
        notices=notices,
        stream=functools.partial(HubStream, source, fitted),
    )


def _nothing_left(source: Hub) -> ConfigError:
    return ConfigError(
        f"data.val_documents={source.held_out}: {source.name} has no document after these to train on; give a smaller "
        "number, or more text"
    )


def _fit(source: Hub, tokenizer: TokenizerOptions, dataset: Any, content: str) -> Tokenizer:
    key = hashlib.sha256(f"{content}{tokenizer.id}".encode()).hexdigest()[:32]
    saved = cache_dir() / f"vocabulary-{key}.json"
    if not isinstance(tokenizer, Bpe) or saved.exists():
        return tokenizer.fit([], saved)
    rows = dataset.skip(source.held_out).take(LEARN_FROM_DOCUMENTS)
    return tokenizer.fit([(str(i), text) for i, text in enumerate(source.texts(rows))], saved)
