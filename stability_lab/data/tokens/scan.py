"""One pass over ids: their largest, entropy and hash before the first use, or what they look like for a person.

Memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.config import ConfigError
from stability_lab.data.repeats import Repetition, repeated_runs
from stability_lab.data.tokens.formats import Region
from stability_lab.data.tokens.memmap import cache_dir, entropy, ids_dtype
from stability_lab.disk.files import read_text, replace_file

SLOW = 2 * 10**8
"""From so many ids on the pass takes seconds, and is announced."""
UNCOUNTED = 2**26
"""Ids from here on are not counted one by one: no vocabulary has them."""

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
    try:
        return Scan(**json.loads(read_text(cached)))
    except (OSError, ValueError, TypeError):
        known = _scan(regions, vocab_size, advice)
        replace_file(cached, json.dumps(asdict(known)))
        return known


def _scan(regions: Sequence[Region], vocab_size: int, advice: str | None) -> Scan:
    tokens = sum(region.count for region in regions)
    if tokens >= SLOW:
        logger.info("checking %s tokens once: ids, entropy and hash", f"{tokens:,}")
    digest, counts, parts = hashlib.sha256(), np.zeros(vocab_size, dtype=np.int64), []
    for region in regions:
        position, part = 0, hashlib.sha256()
        for ids in region.chunks():
            if (at := _first_outside(ids, vocab_size)) is not None:
                advice = advice or (
                    "use the tokenizer that wrote it (data.vocab_size where there is none), or set data.dtype if the "
                    f"ids are not {region.dtype.name}"
                )
                raise ConfigError(
                    f"{region.path}: id {ids[at]:,} at offset {position + at:,} is not in the vocabulary of "
                    f"{vocab_size:,} ids; {advice}"
                )
            raw = ids.astype(ids_dtype(vocab_size), copy=False).tobytes()
            digest.update(raw)
            part.update(raw)
            counts += np.bincount(ids.astype(np.int64), minlength=vocab_size)
            position += len(ids)
        parts.append(part.hexdigest())
    return Scan(tokens, int(np.flatnonzero(counts)[-1]), digest.hexdigest(), entropy(counts), parts)


def _first_outside(ids: npt.NDArray[np.integer], vocab_size: int) -> int | None:
    if ids.min() >= 0 and ids.max() < vocab_size:
        return None
    return int(np.argmax((ids < 0) | (ids >= vocab_size)))


class Statistics(NamedTuple):
    """Facts of all ids, except `bigram_entropy` and `runs`, which are of the first `sampled` ones.

    Entropies are in nats a token; `bigram_entropy` is that of an id when the one before it is known.
    """

    tokens: int
    smallest_id: int
    largest_id: int
    unigram_entropy: float
    frequent: list[tuple[int, int]]  # (id, count), the most frequent first
    distinct: int
    sampled: int
    bigram_entropy: float
    runs: list[Repetition]
    head: npt.NDArray[np.integer]  # those `sampled` ones


def statistics(
    chunks: Iterable[npt.NDArray[np.integer]], sample: int, vocab_size: int = UNCOUNTED, n_frequent: int = 10
) -> Statistics:
    """Facts over chunks of ids in order; ValueError without an id, or with the place of one that is no id."""
    counts, tokens = np.zeros(0, dtype=np.int64), 0
    head: list[npt.NDArray[np.integer]] = []
    for ids in chunks:
        if (at := _first_outside(ids, vocab_size)) is not None:
            raise ValueError(f"id {ids[at]:,} at offset {tokens + at:,} is not in a vocabulary of {vocab_size:,}")
        found = np.bincount(ids.astype(np.int64), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
        head.append(np.array(ids[: max(sample - tokens, 0)]))
        tokens += len(ids)
    if not tokens:
        raise ValueError("there is no id")
    first, seen = np.concatenate(head), np.flatnonzero(counts)
    order = seen[np.argsort(-counts[seen], kind="stable")][:n_frequent]
    return Statistics(
        tokens=tokens,
        smallest_id=int(seen[0]),
        largest_id=int(seen[-1]),
        unigram_entropy=entropy(counts),
        frequent=[(int(i), int(counts[i])) for i in order],
        distinct=len(seen),
        sampled=len(first),
        bigram_entropy=bigram_entropy(first),
        runs=repeated_runs(first),
        head=first,
    )


def bigram_entropy(ids: npt.NDArray[np.integer]) -> float:
    """H(next | one before) of the pairs in `ids`, in nats; 0 without a pair."""
    if len(ids) < 2:
        return 0.0
    codes = ids[:-1].astype(np.int64) * (int(ids.max()) + 1) + ids[1:]
    _, pairs = np.unique(codes, return_counts=True)
    _, firsts = np.unique(ids[:-1], return_counts=True)
    return entropy(pairs) - entropy(firsts)
