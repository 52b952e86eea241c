"""What `data prepare` writes: a folder of shards and a sidecar, and how it is read.

meta.json                            the sidecar: type and number of ids, tokenizer, corpus, hashes
vocabulary.json                      of a learned tokenizer
train-00000.bin, val-00000.bin       ids and nothing else; whole documents, each with its end
train-00000.docs.npy, ...            position of each document's first id in its shard, int64
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.data.source import TokenData
from stability_lab.data.tokenizer import TokenizerOptions, fit_without_text
from stability_lab.data.tokens.formats import Region
from stability_lab.data.tokens.scan import scan
from stability_lab.data.tokens.shards import as_tokens
from stability_lab.disk.files import read_text
from stability_lab.disk.lock import LOCK

FORMAT = "stability_lab-tokens-1"
SIDECAR = "meta.json"
VOCABULARY = "vocabulary.json"
PROGRESS = "progress.json"
"""In a folder whose preparation was interrupted after its first shard."""
SPLITS = ("train", "val")
_KEYS = ("key", "dtype", "vocab_size", "eos_id", "tokenizer", "fingerprint", "unigram_entropy", "corpus")
_SPLIT_KEYS = ("tokens", "documents", "text_bytes")
_SHARD_KEYS = ("file", "documents_file", "tokens", "documents", "sha256")


def is_prepared(folder: Path) -> bool:
    """Whether a finished `data prepare` lies there."""
    try:
        return json.loads(read_text(folder / SIDECAR))["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        return False


def is_unfinished(folder: Path) -> bool:
    """Whether `data prepare` is at work there, or was interrupted."""
    return not is_prepared(folder) and ((folder / PROGRESS).is_file() or (folder / LOCK).is_file())


def refuse_unfinished(folder: Path) -> None:
    """ConfigError for a folder in which `data prepare` has not come to its end: its shards are not all there are."""
    if is_unfinished(folder):
        raise ConfigError(
            f"{folder} is unfinished: run the same data prepare with --out {folder} again, which goes on where it was"
        )


def open_prepared(folder: Path, tokenizer: TokenizerOptions) -> TokenData:
    """Maps of its ids; ConfigError where the tokenizer is not the one that wrote them, or a shard is damaged."""
    meta = read_sidecar(folder)
    fitted = fit_without_text(tokenizer, folder / VOCABULARY)
    if fitted.id != meta["tokenizer"]:
        raise ConfigError(
            f"{folder} was prepared with the tokenizer {meta['tokenizer']}, and this run has {fitted.id}; choose that "
            "one with tokenizer=, or prepare the text again"
        )
    train, val = (_checked(folder, meta, split) for split in SPLITS)
    return TokenData(
        train=as_tokens([region.map() for region in train]),
        val=as_tokens([region.map() for region in val]),
        vocab_size=meta["vocab_size"],
        eos_id=meta["eos_id"],
        unigram_entropy=meta["unigram_entropy"],
        corpus=meta["corpus"],
        fingerprint=meta["fingerprint"],
        token_bytes=fitted.token_bytes(),
        val_bytes=meta["val"]["text_bytes"],
        tokenizer=fitted,
    )


def read_sidecar(folder: Path) -> dict[str, Any]:
    """The sidecar of a finished preparation; ConfigError where something in it is missing or does not add up."""
    meta = json.loads(read_text(folder / SIDECAR))
    try:
        parts = [(meta, _KEYS), *((meta[split], _SPLIT_KEYS) for split in SPLITS)]
        parts += [(shard, _SHARD_KEYS) for split in SPLITS for shard in meta[split]["shards"]]
        for key in (key for part, keys in parts for key in keys if key not in part):
            raise KeyError(key)
        for split in SPLITS:
            if not 0 < sum(shard["tokens"] for shard in meta[split]["shards"]) == meta[split]["tokens"]:
                raise ValueError(f"the shards of {split} do not add up to its tokens")
    except (KeyError, TypeError, ValueError) as error:
        fault = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"{folder / SIDECAR} is damaged ({fault}); delete the folder and prepare it again") from error
    return meta


def regions(folder: Path, meta: dict[str, Any], split: str) -> list[Region]:
    """The shards of a split; ConfigError for one that is missing or has another size than the sidecar says."""
    dtype, found = np.dtype(meta["dtype"]), []
    for shard in meta[split]["shards"]:
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["tokens"] * dtype.itemsize:
            raise ConfigError(
                f"{path}: {'missing' if size is None else f'{size:,} bytes'}, and {SIDECAR} counts "
                f"{shard['tokens']:,} ids of {dtype.itemsize} bytes; delete the folder and prepare it again"
            )
        if shard["tokens"]:
            found.append(Region(path, dtype, 0, shard["tokens"]))
    return found


def _checked(folder: Path, meta: dict[str, Any], split: str) -> list[Region]:
    """The shards of a split, read once to see that they hold what was written; then the cache remembers (`scan`)."""
    found = regions(folder, meta, split)
    expected = [shard["sha256"] for shard in meta[split]["shards"] if shard["tokens"]]
    advice = "the file is damaged: delete the folder and prepare it again"
    for region, sha256, wanted in zip(found, scan(found, meta["vocab_size"], advice).parts, expected, strict=True):
        if sha256 != wanted:
            raise ConfigError(
                f"{region.path}: its SHA-256 begins with {sha256[:12]}, and {SIDECAR} has {wanted[:12]}; {advice}"
            )
    return found
