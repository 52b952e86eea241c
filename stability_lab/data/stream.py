"""Samples from ids that come in one order only; the reader's place is the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stability_lab.config import ConfigError, SamplingConfig
from stability_lab.data.loader import RandomWindows, Sampler, TrainSampler, batch_fingerprint
from stability_lab.data.source import TokenData, TokenStream
from stability_lab.data.tokens.shards import Ids


class StreamSampler:
    """Consecutive windows of a stream: a window's last target is the next one's first input, as in `TrainSampler`.

    Samples must be asked for in order. `state` goes into a checkpoint, and a sampler that loads it goes on with
    the sample after the last one that was given out.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self._stream, self._seq_len = stream, seq_len
        self._next = 0
        self._last_id: int | None = None
        self._ahead = np.zeros((0, seq_len + 1), dtype=np.int64)  # read, and not yet given out

    def batch(self, first: int, n: int) -> Ids:
        """Samples first, ..., first + n - 1, shape (n, seq_len + 1); ValueError unless they are the next ones."""
        if first != self._next:
            raise ValueError(f"sample {first} of a stream that stands at sample {self._next}: it has one order only")
        if n > len(self._ahead):
            self._ahead = np.concatenate([self._ahead, self._read(n - len(self._ahead))])
        batch, self._ahead = self._ahead[:n], self._ahead[n:]
        self._next += n
        return batch

    def _read(self, n: int) -> Ids:
        overlap = np.array([] if self._last_id is None else [self._last_id], dtype=np.int64)
        ids = np.concatenate([overlap, self._stream.read(n * self._seq_len + 1 - len(overlap))])
        self._last_id = int(ids[-1])
        return sliding_window_view(ids, self._seq_len + 1)[:: self._seq_len].copy()

    def describe(self, per_step: int, max_steps: int) -> dict[str, str]:
        """What the manifest holds: the first batch's fingerprint, read ahead, and how a resumed run continues."""
        facts = {"resume": "exact" if self._stream.exact else "approximate: the shuffle buffer is not saved"}
        if self._next or len(self._ahead):
            return facts
        self._ahead = self._read(per_step)
        return {"first_batch": batch_fingerprint(self._ahead), **facts}

    def state(self) -> dict[str, Any]:
        ahead = self._ahead.tolist()
        return {"next": self._next, "last_id": self._last_id, "ahead": ahead, "stream": self._stream.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state(state["stream"])
        self._next, self._last_id = state["next"], state["last_id"]
        self._ahead = np.array(state["ahead"], dtype=np.int64).reshape(-1, self._seq_len + 1)


def build_sampler(data: TokenData, seq_len: int, data_seed: int, sampling: SamplingConfig) -> Sampler:
    """The sampler that the configuration asks for; ConfigError where a stream cannot do it."""
    if data.stream is not None:
        if sampling.name == "random_window":
            raise ConfigError(
                "sampling=random_window: a stream is read in its own order; set data.shuffle_buffer, or "
                "data.streaming=false"
            )
        return StreamSampler(data.stream(data_seed), seq_len)
    kind = {"permutation": TrainSampler, "random_window": RandomWindows}[sampling.name]
    return kind(data.train, seq_len, data_seed)
