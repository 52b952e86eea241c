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


class Repetition(NamedTuple):
    """`repeats` copies of the `period` tokens at `start`, one after the other."""

    start: int
    period: int
    repeats: int


def repetitive(
    tokens_NT: npt.NDArray[np.integer], longest: int = LONGEST, repeats: int = REPEATS
) -> npt.NDArray[np.bool_]:
    """Which rows hold a repetition, shape (N,) of bool; rows shorter than one hold none."""
    found_N = np.zeros(len(tokens_NT), dtype=bool)
    for period in range(1, longest + 1):
        need = (repeats - 1) * period  # places that equal the one a period before
        if tokens_NT.shape[1] < need + period:
            break
        rows = np.flatnonzero(_may_repeat(tokens_NT, period, need))
        if len(rows):
            found_N[rows] |= _repeats(tokens_NT[rows], period, need)
    return found_N


def _may_repeat(tokens_NT: npt.NDArray[np.integer], period: int, need: int) -> npt.NDArray[np.bool_]:
    """Rows that look so at every few places, shape (N,): of `need` places in a row, four are multiples of need // 4."""
    step = need // 4
    if step == 0:
        return np.ones(len(tokens_NT), dtype=bool)
    same = tokens_NT[:, period::step] == tokens_NT[:, :-period:step]
    return (same[:, :-3] & same[:, 1:-2] & same[:, 2:-1] & same[:, 3:]).any(1)


def _repeats(tokens_NT: npt.NDArray[np.integer], period: int, need: int) -> npt.NDArray[np.bool_]:
    same_NT = tokens_NT[:, period:] == tokens_NT[:, :-period]
    counted_NT = np.zeros((len(same_NT), same_NT.shape[1] + 1), dtype=np.int32)
    np.cumsum(same_NT, axis=1, out=counted_NT[:, 1:])
    return (counted_NT[:, need:] - counted_NT[:, :-need] == need).any(1)


def repeated_runs(
    tokens_T: npt.NDArray[np.integer], longest: int = LONGEST, repeats: int = REPEATS
) -> list[Repetition]:
    """Every repetition, by its start; a run of a short period is not reported again for that period's multiples."""
    runs: list[Repetition] = []
    covered = np.zeros(len(tokens_T), dtype=bool)
    for period in range(1, longest + 1):
        if len(tokens_T) < repeats * period:
            break
        same = tokens_T[period:] == tokens_T[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2).tolist():
            copies = (end - begin) // period + 1
            if copies >= repeats and not covered[begin : end + period].all():
                runs.append(Repetition(begin, period, copies))
                covered[begin : end + period] = True
    return sorted(runs)
