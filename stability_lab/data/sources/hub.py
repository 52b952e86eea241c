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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.data.content import content_hash
from stability_lab.data.network import commit_of, hub_error, is_cached, use_hub
from stability_lab.data.sources.text_files import Document
from stability_lab.data.tokenizer import Bpe, Tokenizer, TokenizerOptions
from stability_lab.data.tokens.memmap import TokenData, cache_dir, entropy, ids_dtype
from stability_lab.data.tokens.shards import Ids

INSTEAD = "data=text, data=sotu or data=synthetic"
LOCAL = ("arrow", "csv", "json", "parquet")
"""Names that mean a format of local files and no dataset of the hub."""
VAL_DOCUMENTS, LOCAL_VAL_EVERY = 1000, 20
"""Documents of the validation split unless `val_documents` says it; of local files at most every so-manieth."""
LEARN_FROM_DOCUMENTS = 20_000
"""Documents after the validation split that a streamed vocabulary is learned from."""

logger = logging.getLogger("stability_lab")


@dataclass(frozen=True)
class Hub:
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

    def files(self) -> list[str]:
        """Of a local dataset, sorted; ConfigError where there are none."""
        found = sorted(glob.glob(str(Path(self.data_files or "").expanduser()), recursive=True))
        if not found:
            raise ConfigError(f"data.data_files={self.data_files}: no file matches (from {Path.cwd()})")
        return found

    @functools.cached_property
    def held_out(self) -> int:
        """Documents of the validation split. Where local files decide, the first 20,000 documents are counted."""
        if self.val_documents is not None or self.data_files is None:
            return self.val_documents or VAL_DOCUMENTS
        texts = _texts(open_dataset(self, streaming=True), self)
        with _its_errors(self):
            seen = sum(1 for _ in itertools.islice(texts, LOCAL_VAL_EVERY * VAL_DOCUMENTS))
        return max(1, seen // LOCAL_VAL_EVERY)

    def holds_out(self, number: int) -> bool:
        return number < self.held_out

    def identity(self) -> dict[str, Any]:
        keys = ("config", "split", "revision", "field", "val_documents")
        stats = [(path, Path(path).stat()) for path in self.files()] if self.data_files else []
        return {key: getattr(self, key) for key in keys} | {"files": [[p, s.st_size, s.st_mtime_ns] for p, s in stats]}

    def content(self) -> str:
        """The same wherever local files lie, and another once a byte of theirs is (`content_hash`).

        Of a dataset of the hub its options say all, once `pinned`.
        """
        files = (
            [[Path(path).stat().st_size, content_hash(Path(path))] for path in self.files()] if self.data_files else []
        )
        options = replace(self, data_files="") if self.data_files else self
        return hashlib.sha256(f"{options!r}{files}".encode()).hexdigest()

    def about(self) -> dict[str, str | int]:
        return {
            "name": self.name if self.config is None else f"{self.name}/{self.config}",
            "version": self.revision or "not pinned",
            "source": self.data_files or f"https://huggingface.co/datasets/{self.name}",
            "licence": "see its dataset card",
        }

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        """All documents, fetched to the disk first. Rows without text are left out."""
        rows = open_dataset(self, streaming=False)
        named = (
            (f"{number:012d}", text) for number, text in enumerate(_text(row, self) for row in rows) if text.strip()
        )
        return itertools.islice(named, skip, None)


def open_dataset(source: Hub, streaming: bool) -> Any:
    """A `datasets.Dataset`, or an `IterableDataset`, of the text column; ConfigError for what the library raises."""
    files = source.files() if source.data_files else None
    online = files is not None or use_hub()
    if not online and not is_cached("datasets", source.name):
        raise hub_error(
            f"data.name={source.name}", None, online, INSTEAD
        )  # at once: importing the library takes seconds
    import datasets
    import datasets.config

    if not online:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        datasets.disable_progress_bars()
        dataset = datasets.load_dataset(
            source.name,
            source.config,
            split=source.split,
            revision=source.revision,
            data_files=files,
            streaming=streaming,
        )
    except Exception as error:
        raise _sentence(source, error, online) from error
    columns = dataset.column_names
    if columns is not None and source.field not in columns:
        raise ConfigError(f"data.field={source.field}: {source.name} has the columns {', '.join(columns)}")
    return dataset.select_columns([source.field])


def _text(row: Mapping[str, Any], source: Hub) -> bytes:
    """Of a row, empty where it has none (null); ConfigError where it is no text."""
    text = row.get(source.field)
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ConfigError(f"data.field={source.field}: {source.name} has no text there but {type(text).__name__}")
    return text.encode(errors="replace")


def _texts(rows: Iterable[Mapping[str, Any]], source: Hub) -> Iterator[bytes]:
    """Of the rows that have one."""
    return (text for row in rows if (text := _text(row, source)).strip())


@contextmanager
def _its_errors(source: Hub) -> Iterator[None]:
    """ConfigError for whatever the library raises while rows are read."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _sentence(source, error, online=True) from error


def _sentence(source: Hub, error: Exception, online: bool) -> ConfigError:
    if isinstance(error, KeyError) and error.args == (source.field,):  # columns that only the first row shows
        return ConfigError(
            f"data.field={source.field}: {source.name} has no column of that name; name the one with text"
        )
    if source.data_files is None:
        return hub_error(f"data.name={source.name}", error, online, INSTEAD)
    cause = error
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # the other one says only that there was one
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    return ConfigError(
        f"data.data_files={source.data_files}: cannot be read as data.name={source.name} ({reason.rstrip('.')}); mend "
        "the file, or name the format that it has"
    )


class Dataset(Protocol):
    """What a stream needs of `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def set_epoch(self, epoch: int) -> None: ...


class HubStream:
    """Ids of the documents after the validation split, one after the other and epoch after epoch."""

    def __init__(self, source: Hub, tokenizer: Tokenizer, data_seed: int) -> None:
        self._source, self._tokenizer = source, tokenizer
        dataset = open_dataset(source, streaming=True).skip(source.held_out)
        if source.shuffle_buffer:
            dataset = dataset.shuffle(seed=data_seed % 2**63, buffer_size=source.shuffle_buffer)
        self._dataset: Dataset = dataset
        self._rows = iter(self._dataset)
        self._left: Ids = np.zeros(0, dtype=np.int64)
        self._epoch = self._of_epoch = 0  # of_epoch: rows read in this one
        self._has_text = False  # whether any of these was one

    @property
    def exact(self) -> bool:
        return self._source.shuffle_buffer == 0

    def read(self, n: int) -> Ids:
        """RuntimeError with one sentence where the hub or a file fails in the middle of training."""
        try:
            return self._read(n)
        except ConfigError:
            raise
        except Exception as error:
            # Without the library's own error, which a traceback would show, access tokens and all.
            raise RuntimeError(str(_sentence(self._source, error, online=True))) from None

    def _read(self, n: int) -> Ids:
        parts, missing = [self._left], n - len(self._left)
        while missing > 0:
            ids = self._tokenizer.encode(self._next())
            parts.append(np.append(ids, self._tokenizer.eos_id).astype(np.int64))
            missing -= len(parts[-1])
        ids = np.concatenate(parts)
        self._left = ids[n:]
        return ids[:n]

    def _next(self) -> bytes:
        for row in self._rows:
            self._of_epoch += 1
            text = _text(row, self._source)
            if text.strip():
                self._has_text = True
                return text
        if not self._has_text:
            raise _nothing_left(self._source)
        self._epoch, self._of_epoch, self._has_text = self._epoch + 1, 0, False
        logger.info("%s is read to its end, and again from its beginning (epoch %d)", self._source.name, self._epoch)
        self._dataset.set_epoch(self._epoch)
        self._rows = iter(self._dataset)
        return self._next()

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataset": self._dataset.state_dict() if self._of_epoch else None,
            "left": self._left.tolist(),
            "epoch": self._epoch,
            "of_epoch": self._of_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._left = np.array(state["left"], dtype=np.int64)
        self._epoch, self._of_epoch = state["epoch"], state["of_epoch"]
        self._has_text = self._of_epoch > 0
        self._dataset.set_epoch(self._epoch)
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._rows = iter(self._dataset)


def pinned(source: Hub) -> Hub:
    """With the commit that its revision means now, where the hub or its cache tells."""
    if source.data_files is not None:
        return source
    return replace(source, revision=commit_of(source.name, source.revision) or source.revision)


def stream_tokens(source: Hub, tokenizer: TokenizerOptions) -> TokenData:
    """Validation ids in memory, and a stream for training; `unigram_entropy` is that of the validation ids."""
    source = pinned(source)
    return _stream_tokens(source, tokenizer, source.content())


@functools.lru_cache(maxsize=2)  # a command checks, then builds, each time from the same options
def _stream_tokens(source: Hub, tokenizer: TokenizerOptions, content: str) -> TokenData:
    dataset = open_dataset(source, streaming=True)
    with _its_errors(source):
        rows = iter(dataset)
        documents = list(_texts(itertools.islice(rows, source.held_out), source))
        if not documents:
            raise ConfigError(
                f"data.val_documents={source.held_out}: the first {source.held_out} rows of {source.name}, split "
                f"{source.split}, hold no text for validation; give a larger number"
            )
        if next(_texts(rows, source), None) is None:
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
    return tokenizer.fit([(str(i), _text(row, source)) for i, row in enumerate(rows)], saved)
