"""`data=tokens`: files of ids that were tokenised elsewhere, or by `data prepare`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.data.bad_files import checked_each
from stability_lab.data.source import TokenData
from stability_lab.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerOptions, fit_without_text
from stability_lab.data.tokens.formats import DTYPES, FoundFormat, looks_like_wider_ids, recognise
from stability_lab.data.tokens.prepared import is_prepared, open_prepared, refuse_unfinished
from stability_lab.data.tokens.scan import Scan, scan
from stability_lab.data.tokens.shards import as_tokens
from stability_lab.disk.content import HEAD, is_utf8

SUFFIXES = (".bin", ".npy")
ID_LIMIT = {"uint8": 257, "uint16": 2**16}
"""Largest vocabulary whose ids a type can hold; bytes may go without their end of a document."""


@dataclass(frozen=True)
class TokenFiles:
    """Ids of nanoGPT, llm.c, modded-nanogpt, OLMo, numpy, Megatron or `data prepare`, told apart by content.

    `path` is a file, a glob or a folder; in a folder, files named val... are validation. Where there are none and
    `val_path` is null, the last `val_fraction` of the ids is held out. `dtype` says that files without a header are
    ids of this type; null refuses them. `vocab_size` null means the tokenizer's; another number says that the ids
    have no known text.
    """

    name: ClassVar[str] = "tokens"
    path: str
    val_path: str | None = None
    val_fraction: float = 0.05
    dtype: str | None = None
    vocab_size: int | None = None
    eos_id: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}, or null")
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction:g}: must lie between 0 and 1")
        if self.vocab_size is not None and not 2 <= self.vocab_size <= 2**31:
            raise ValueError(f"vocab_size={self.vocab_size}: must be 2 to 2147483648, or null for the tokenizer's")
        if self.eos_id is not None and not 0 <= self.eos_id < (self.vocab_size or 2**31):
            raise ValueError(f"eos_id={self.eos_id}: must be an id of the vocabulary, or null")

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        """Maps of the ids, once all of them are known to be in the vocabulary."""
        folder = Path(os.path.expanduser(self.path))
        if is_prepared(folder):
            self._refuse_options_of_raw_files()
            return open_prepared(folder, tokenizer)
        refuse_unfinished(folder)
        fitted = fit_without_text(tokenizer)
        vocab_size = self.vocab_size or fitted.vocab_size
        train, val = self.files()
        known = checked_each([*train, *val], lambda path: _checked(path, self.dtype, vocab_size))
        return self._data(known[: len(train)], known[len(train) :], fitted, vocab_size)

    def files(self) -> tuple[list[Path], list[Path]]:
        """(training, validation) files, each in the order of their names."""
        paths = _paths(self.path, "data.path")
        if self.val_path is not None:
            return paths, _paths(self.val_path, "data.val_path")
        if not os.path.isdir(os.path.expanduser(self.path)):
            return paths, []
        val = [path for path in paths if _is_named(path, "val|valid|validation")]
        train = [path for path in paths if path not in val and not _is_named(path, "test")]
        if not train:
            raise ConfigError(f"data.path={self.path}: the folder has no file of training tokens beside {val[0].name}")
        return train, val

    def _data(
        self, found: list[FoundFormat], held_out: list[FoundFormat], fitted: Tokenizer, vocab_size: int
    ) -> TokenData:
        facts = scan([one.region for one in found], vocab_size)
        train = as_tokens([one.region.map() for one in found])
        notices: tuple[str, ...] = ()
        if held_out:
            val_facts = scan([one.region for one in held_out], vocab_size)
            val, val_hash = as_tokens([one.region.map() for one in held_out]), val_facts.sha256
        else:
            cut = len(train) - max(1, round(len(train) * self.val_fraction))
            train, val, val_hash = train[:cut], train[cut:], f"last {self.val_fraction:g}"
            notices = (f"validation is the last {self.val_fraction:.0%} of the ids; data.val_path names other files",)
        known_text = vocab_size == fitted.vocab_size
        if known_text and isinstance(fitted, ByteTokenizer):
            for one in (*found, *held_out):
                _check_bytes(one, facts.largest_id)
        eos_id = self.eos_id if self.eos_id is not None else fitted.eos_id if known_text else None
        if eos_id is not None and eos_id >= vocab_size:
            raise ConfigError(f"data.eos_id={eos_id}: must be below the vocabulary's {vocab_size}")
        return TokenData(
            train=train,
            val=val,
            vocab_size=vocab_size,
            eos_id=eos_id,
            eos_first=eos_id is not None and int(found[0].region.map()[0]) == eos_id,
            unigram_entropy=facts.unigram_entropy,
            corpus=self._description(found, facts),
            fingerprint=f"{facts.sha256}-{val_hash}",
            token_bytes=fitted.token_bytes() if known_text else np.zeros(0, dtype=np.int64),
            tokenizer=fitted if known_text else None,
            notices=notices,
        )

    def _description(self, found: Sequence[FoundFormat], facts: Scan) -> dict[str, str | int]:
        formats = ", ".join(sorted({f"{one.format} {one.region.dtype.name}" for one in found}))
        return {
            "name": self.name,
            "version": formats,
            "sha256": facts.sha256,
            "source": self.path,
            "licence": "not recorded",
            "files": len(found),
            "bytes": sum(one.region.count * one.region.dtype.itemsize for one in found),
        }

    def _refuse_options_of_raw_files(self) -> None:
        for key in ("val_path", "dtype", "vocab_size", "eos_id"):
            if getattr(self, key) is not None:
                raise ConfigError(f"data.{key}={getattr(self, key)}: {self.path} was prepared and knows that itself")


def _checked(path: Path, dtype: str | None, vocab_size: int) -> FoundFormat:
    found = recognise(path, dtype)
    region = found.region
    wider = looks_like_wider_ids(region) if found.format == "raw" else None
    if wider is not None:
        raise ConfigError(
            f"{path}: read as {region.dtype.name}, most ids at regular places are 0, they are probably {wider}: "
            f"set data.dtype={wider}"
        )
    if vocab_size > ID_LIMIT.get(region.dtype.name, vocab_size):
        raise ConfigError(
            f"{path}: its ids are {region.dtype.name}, and a vocabulary of {vocab_size:,} does not fit: larger "
            "ids were wrapped when it was written; write it with a wider type, or use the tokenizer that fits"
        )
    return found


def _check_bytes(found: FoundFormat, largest_id: int) -> None:
    """ConfigError where ids below 257 are those of another small vocabulary, and no bytes of text."""
    ids = found.region.map()[:HEAD]
    text = ids[ids < 256].astype(np.uint8).tobytes()
    if text and not is_utf8(text.lstrip(bytes(range(0x80, 0xC0)))):  # a shard may begin within a character
        raise ConfigError(
            f"{found.region.path}: its ids are no bytes of UTF-8 text, as tokenizer=bytes has them; use the tokenizer "
            f"that wrote it, or data.vocab_size={258 if largest_id == 256 else largest_id + 1}, which knows no text"
        )


def _paths(pattern: str, key: str) -> list[Path]:
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        paths = [p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file()]
    elif path.is_file():
        paths = [path]
    else:
        paths = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
    if not paths:
        raise ConfigError(
            f"{key}={pattern}: no token file there (from {Path.cwd()}); give a file, a folder of "
            f"{' or '.join(SUFFIXES)} files or a glob pattern"
        )
    return sorted(paths)


def _is_named(path: Path, words: str) -> bool:
    return re.search(rf"(^|[^a-z])({words})([^a-z]|$)", path.stem.lower()) is not None
