"""Repeated n-grams: what OLMo 2 found behind many loss spikes (arXiv:2501.00656, section 3.1).

A sequence is repetitive where an n-gram of 1 to 13 tokens follows itself so that it stands there 32 times or more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 13
"""Tokens of the longest n-gram that is looked for."""
REPEATS = 32
"""How often an n-gram has to stand in a row."""


class Run(NamedTuple):
    """`repeats` copies of the `period` tokens at `start`, one after the other."""

    start: int
    period: int
    repeats: int


def repetitive(tokens_NT: npt.NDArray[np.integer], longest: int = LONGEST, repeats: int = REPEATS) -> npt.NDArray:
    """Which rows hold a repetition, shape (N,) of bool; rows shorter than one hold none."""
    found_N = np.zeros(len(tokens_NT), dtype=bool)
    for period in range(1, longest + 1):
        need = (repeats - 1) * period  # places that equal the one a period before
        if tokens_NT.shape[1] < need + period:
            break
        same_NT = tokens_NT[:, period:] == tokens_NT[:, :-period]
        counted_NT = np.zeros((len(same_NT), same_NT.shape[1] + 1), dtype=np.int32)
        np.cumsum(same_NT, axis=1, out=counted_NT[:, 1:])
        found_N |= (counted_NT[:, need:] - counted_NT[:, :-need] == need).any(1)
    return found_N


def repeated_runs(tokens_T: npt.NDArray[np.integer], longest: int = LONGEST, repeats: int = REPEATS) -> list[Run]:
    """Every repetition, by its start; a run of a short period is not reported again for that period's multiples."""
    runs: list[Run] = []
    covered = np.zeros(len(tokens_T), dtype=bool)
    for period in range(1, longest + 1):
        if len(tokens_T) < repeats * period:
            break
        same = tokens_T[period:] == tokens_T[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2).tolist():
            copies = (end - begin) // period + 1
            if copies >= repeats and not covered[begin : end + period].all():
                runs.append(Run(begin, period, copies))
                covered[begin : end + period] = True
    return sorted(runs)
