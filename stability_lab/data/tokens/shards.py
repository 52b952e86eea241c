"""Several arrays of ids, one after the other, read as one without a copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Ids: TypeAlias = npt.NDArray[np.int64]


class Shards:
    """Arrays of ids as one of `len(self)`; an index is a 64-bit position over all of them."""

    def __init__(self, parts: Sequence[npt.NDArray[np.integer]]) -> None:
        assert parts
        self.parts = list(parts)
        self.dtype = np.result_type(*parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All ids in memory: for those of few shards, and for slices."""
        return np.concatenate(self.parts).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: slice) -> npt.NDArray[np.integer] | Shards:
        """Consecutive ids: a view where they lie in one part, else again a `Shards`."""
        start, stop, step = key.indices(len(self))
        assert step == 1
        pieces, part = [], bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[part] - len(self.parts[part])
            pieces.append(self.parts[part][start - begin : stop - begin])
            start, part = start + len(pieces[-1]), part + 1
        return as_tokens(pieces) if pieces else np.empty(0, self.dtype)


Tokens: TypeAlias = npt.NDArray[np.integer] | Shards


class Windows:
    """Windows of `length` consecutive ids of a `Shards`, indexed by their first positions as numpy's view is."""

    def __init__(self, tokens: Shards, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return len(self._tokens) - self._length + 1

    def __getitem__(self, starts: Ids) -> npt.NDArray[np.integer]:
        """(n,) -> (n, length)"""
        return np.array([np.asarray(self._tokens[start : start + self._length]) for start in starts.tolist()])


def windows_of(tokens: npt.NDArray[Any] | Shards, length: int) -> npt.NDArray[Any] | Windows:
    """All len(tokens) - length + 1 windows, to be indexed by an array of first positions: no copy of the tokens."""
    if isinstance(tokens, Shards):
        return Windows(tokens, length)
    # A plain ndarray indexes faster than np.memmap, whose subclass machinery runs at every access.
    return sliding_window_view(np.asarray(tokens), length)


def as_tokens(parts: Sequence[npt.NDArray[np.integer]]) -> Tokens:
    return parts[0] if len(parts) == 1 else Shards(parts)
