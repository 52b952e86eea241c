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
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.dtype = np.result_type(*parts)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All ids in memory: for those of few shards, and for slices."""
        return np.concatenate(self.parts).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: slice) -> npt.NDArray[np.integer] | Shards:
        """Consecutive ids: a view where they lie in one part, else again a `Shards`."""
        start, stop, step = key.indices(len(self))
        assert step == 1
        pieces = []
        for end, part in zip(self.ends, self.parts, strict=True):
            begin = int(end) - len(part)
            piece = part[max(start - begin, 0) : max(stop - begin, 0)]
            if len(piece):
                pieces.append(piece)
        if not pieces:
            return np.empty(0, self.dtype)
        return pieces[0] if len(pieces) == 1 else Shards(pieces)


Tokens: TypeAlias = npt.NDArray[np.integer] | Shards


class Windows:
    """Windows of `length` consecutive ids of a `Shards`, indexed by their first positions as numpy's view is."""

    def __init__(self, tokens: Shards, length: int) -> None:
        self.parts, self.length = tokens.parts, length
        self._ends = tokens.ends.tolist()

    def __len__(self) -> int:
        return self._ends[-1] - self.length + 1

    def __getitem__(self, starts: Ids) -> Ids:
        """(n,) -> (n, length)"""
        windows = np.empty((len(starts), self.length), dtype=np.int64)
        for start, window in zip(starts.tolist(), windows, strict=True):
            part = bisect_right(self._ends, start)
            place = start - self._ends[part]  # from the part's end, and so negative
            filled = 0
            while filled < self.length:
                ids = self.parts[part]
                begin = len(ids) + place
                piece = ids[begin : begin + self.length - filled]
                window[filled : filled + len(piece)] = piece
                filled, part = filled + len(piece), part + 1
                place = -len(self.parts[part]) if filled < self.length else 0
        return windows


def windows_of(tokens: npt.NDArray[Any] | Shards, length: int) -> npt.NDArray[Any] | Windows:
    """All len(tokens) - length + 1 windows, to be indexed by an array of first positions: no copy of the tokens."""
    if isinstance(tokens, Shards):
        return Windows(tokens, length)
    # A plain ndarray indexes faster than np.memmap, whose subclass machinery runs at every access.
    return sliding_window_view(np.asarray(tokens), length)


def as_tokens(parts: Sequence[npt.NDArray[np.integer]]) -> Tokens:
    return parts[0] if len(parts) == 1 else Shards(parts)
