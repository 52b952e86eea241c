"""What a stream of ids looks like: counts, entropies and repetitions. Memory does not grow with its length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.data.repeats import Repetition, repeated_runs
from stability_lab.data.tokens.memmap import entropy

COUNTED_IDS = 2**26
"""Ids from here on are not counted one by one: no vocabulary has them."""


class Statistics(NamedTuple):
    """Of all ids, except `bigram_entropy` and `runs`, which are of the first `sampled` ones.

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


def statistics(chunks: Iterable[npt.NDArray[np.integer]], sample: int, n_frequent: int = 10) -> Statistics:
    """Over chunks of ids in order; ValueError without an id or with ids that no vocabulary has."""
    counts = np.zeros(0, dtype=np.int64)
    tokens, smallest, head, missing = 0, None, [], sample
    for ids in chunks:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= COUNTED_IDS:
            at = tokens + int(np.argmax((ids < 0) | (ids >= COUNTED_IDS)))
            raise ValueError(f"{low if low < 0 else high:,} near offset {at:,} is no id of a vocabulary")
        if high >= len(counts):
            counts = np.concatenate((counts, np.zeros(high + 1 - len(counts), dtype=np.int64)))
        counts += np.bincount(ids.astype(np.int64), minlength=len(counts))
        smallest = low if smallest is None else min(smallest, low)
        tokens += len(ids)
        if missing > 0:
            head.append(np.array(ids[:missing]))
            missing -= len(head[-1])
    if smallest is None:
        raise ValueError("there is no id")
    first = np.concatenate(head)
    order = np.argsort(-counts, kind="stable")[:n_frequent]
    return Statistics(
        tokens=tokens,
        smallest_id=smallest,
        largest_id=len(counts) - 1,
        unigram_entropy=entropy(counts),
        frequent=[(int(i), int(counts[i])) for i in order if counts[i]],
        distinct=int(np.count_nonzero(counts)),
        sampled=len(first),
        bigram_entropy=bigram_entropy(first),
        runs=repeated_runs(first),
    )


def bigram_entropy(ids: npt.NDArray[np.integer]) -> float:
    """H(next | one before) of the pairs in `ids`, in nats; 0 without a pair."""
    if len(ids) < 2:
        return 0.0
    codes = ids[:-1].astype(np.int64) * (int(ids.max()) + 1) + ids[1:]
    _, pairs = np.unique(codes, return_counts=True)
    _, firsts = np.unique(ids[:-1], return_counts=True)
    return entropy(pairs) - entropy(firsts)
