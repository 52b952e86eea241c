"""One pass over token files before their first use: largest id, entropy and hash, kept in the cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.tokens.formats import Region
from stability_lab.data.tokens.memmap import cache_dir, entropy, ids_dtype
from stability_lab.disk.files import replace_file

SLOW = 2 * 10**8
"""From so many ids on the pass takes seconds, and is announced."""

logger = logging.getLogger("stability_lab")


@dataclass(frozen=True)
class Scan:
    """`sha256` is over the ids as little-endian uint16 (uint32 above 65,536 ids), whatever the files' own type.

    `parts` has the same of each region.
    """

    tokens: int
    largest_id: int
    sha256: str
    unigram_entropy: float
    parts: list[str]


def scan(regions: Sequence[Region], vocab_size: int, advice: str | None = None) -> Scan:
    """Facts of all ids in order; ConfigError with the place of the first id that is not below `vocab_size`.

    `advice` ends that sentence; None is the one for files of unknown origin.

    The result is kept under the files' paths, sizes and times of change: the second call reads nothing.
    """
    key = [str(vocab_size)]
    for region in regions:
        stat = region.path.stat()
        key.append(f"{region.path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{region.offset}:{region.dtype.str}")
    cached = cache_dir() / f"scan-{hashlib.sha256(chr(10).join(key).encode()).hexdigest()[:32]}.json"
    known = _load(cached)
    if known is None:
        known = _scan(regions, vocab_size, advice)
        replace_file(cached, json.dumps(asdict(known)))
    return known


def _scan(regions: Sequence[Region], vocab_size: int, advice: str | None) -> Scan:
    tokens = sum(region.count for region in regions)
    if tokens >= SLOW:
        logger.info("checking %s tokens once: ids, entropy and hash", f"{tokens:,}")
    digest, counts = hashlib.sha256(), np.zeros(vocab_size, dtype=np.int64)
    parts = []
    for region in regions:
        position, part = 0, hashlib.sha256()
        for ids in region.chunks():
            _check_ids(ids, vocab_size, region, position, advice)
            raw = ids.astype(ids_dtype(vocab_size), copy=False).tobytes()
            digest.update(raw)
            part.update(raw)
            counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
            position += len(ids)
        parts.append(part.hexdigest())
    return Scan(tokens, int(np.flatnonzero(counts)[-1]), digest.hexdigest(), entropy(counts), parts)


def _check_ids(
    ids: npt.NDArray[np.integer], vocab_size: int, region: Region, position: int, advice: str | None
) -> None:
    if ids.min() >= 0 and ids.max() < vocab_size:
        return
    at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
    advice = advice or (
        "use the tokenizer that wrote it (data.vocab_size where there is none), or set data.dtype if the ids are not "
        f"{region.dtype.name}"
    )
    raise ConfigError(
        f"{region.path}: id {ids[at]:,} at offset {position + at:,} is not in the vocabulary of {vocab_size:,} ids; "
        f"{advice}"
    )


def _load(path: Path) -> Scan | None:
    try:
        return Scan(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
