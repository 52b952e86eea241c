"""What `data prepare` writes: a folder of shards and a sidecar, and how it is read.

meta.json                            the sidecar: type and number of ids, tokenizer, corpus, hashes
vocabulary.json                      of a learned tokenizer
train-00000.bin, val-00000.bin       ids and nothing else; whole documents, each with its end
train-00000.docs.npy, ...            position of each document's first id in its shard, int64
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.data.tokenizer import TokenizerOptions, fit_without_text
from stability_lab.data.tokens.formats import Region
from stability_lab.data.tokens.memmap import TokenData
from stability_lab.data.tokens.scan import scan
from stability_lab.data.tokens.shards import as_tokens
from stability_lab.disk.lock import LOCK

FORMAT = "stability_lab-tokens-1"
SIDECAR = "meta.json"
VOCABULARY = "vocabulary.json"
PROGRESS = "progress.json"
"""In a folder whose preparation was interrupted after its first shard."""
SPLITS = ("train", "val")


def is_prepared(folder: Path) -> bool:
    """Whether a finished `data prepare` lies there."""
    try:
        return json.loads((folder / SIDECAR).read_text(encoding="utf-8"))["format"] == FORMAT
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
    """Of a finished preparation; ConfigError where something is missing in it, or is of another kind."""
    meta = json.loads((folder / SIDECAR).read_text(encoding="utf-8"))
    fault = _fault(meta, _SIDECAR, "")
    for split in SPLITS:
        fault = fault or _fault(meta[split], _SPLIT, f"{split}.")
        for i, shard in enumerate([] if fault else meta[split]["shards"]):
            fault = fault or _fault(shard, _SHARD, f"{split}.shards[{i}].")
        if not fault and not sum(shard["tokens"] for shard in meta[split]["shards"]):
            fault = f"its {split}.shards hold no token"
    if fault:
        raise ConfigError(f"{folder / SIDECAR} is damaged ({fault}); delete the folder and prepare it again")
    return meta


_SIDECAR = {
    "key": dict,
    "dtype": str,
    "vocab_size": int,
    "eos_id": int,
    "tokenizer": str,
    "fingerprint": str,
    "unigram_entropy": float,
    "dropped_documents": int,
    "corpus": dict,
    "train": dict,
    "val": dict,
}
_SPLIT = {"shards": list, "tokens": int, "documents": int, "text_bytes": int}
_SHARD = {"file": str, "documents_file": str, "tokens": int, "documents": int, "sha256": str}


def _fault(found: Any, kinds: Mapping[str, type], where: str) -> str | None:
    if not isinstance(found, dict):
        return f"its {where.rstrip('.')} is no object"
    for name, kind in kinds.items():
        if name not in found:
            return f"it has no {where}{name}"
        if not isinstance(found[name], kind):
            return f"its {where}{name} is no {kind.__name__}"
    return None


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


def document_starts(folder: Path, meta: dict[str, Any], split: str) -> np.ndarray:
    """Position of each document's first id in the split, shape (documents,), int64."""
    starts, position = [np.zeros(0, dtype=np.int64)], 0
    for shard in meta[split]["shards"]:
        starts.append(np.load(folder / shard["documents_file"], allow_pickle=False) + position)
        position += shard["tokens"]
    return np.concatenate(starts)
