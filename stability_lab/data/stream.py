"""Samples from ids that come in one order only; where the reader stands is its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stability_lab.config import ConfigError, SamplingConfig
from stability_lab.data.loader import RandomWindows, Sampler, TrainSampler, batch_fingerprint
from stability_lab.data.tokens.memmap import TokenData, TokenStream
from stability_lab.data.tokens.shards import Ids


class StreamSampler:
    """Consecutive windows of a stream: a window's last target is the next one's first input, as in `TrainSampler`.

    Samples must be asked for in order. `state_dict` goes into a checkpoint, and a sampler that loads it goes on with
    the sample after the last one that was given out.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self._stream, self._seq_len = stream, seq_len
        self._next = 0
        self._last_id: int | None = None
        self._ahead = np.zeros((0, seq_len + 1), dtype=np.int64)  # read, and not yet given out
        self._saved: dict[str, Any] | None = None  # the state before those were read
        self._taken = 0  # of those, given out since

    def batch(self, first: int, n: int) -> Ids:
        """Samples first, ..., first + n - 1, shape (n, seq_len + 1); ValueError unless they are the next ones."""
        if first != self._next:
            raise ValueError(f"sample {first} of a stream that stands at sample {self._next}: it has one order only")
        known = self._ahead[:n]
        self._ahead, self._taken = self._ahead[len(known) :], self._taken + len(known)
        if not len(self._ahead):
            self._saved, self._taken = None, 0
        self._next += n
        return known if len(known) == n else np.concatenate([known, self._read(n - len(known))])

    def _read(self, n: int) -> Ids:
        have = 0 if self._last_id is None else 1
        ids = np.empty(n * self._seq_len + 1, dtype=np.int64)
        if self._last_id is not None:
            ids[0] = self._last_id
        ids[have:] = self._stream.read(len(ids) - have)
        self._last_id = int(ids[-1])
        return np.lib.stride_tricks.sliding_window_view(ids, self._seq_len + 1)[:: self._seq_len].copy()

    def describe(self, per_step: int, max_steps: int) -> dict[str, str]:
        """For the manifest: the first batch's fingerprint, read ahead for it, and how a resumed run goes on."""
        facts = {"resume": "exact" if self._stream.exact else "approximate: the shuffle buffer is not saved"}
        if self._next or len(self._ahead):
            return facts
        self._saved = self.state_dict()
        self._ahead = self._read(per_step)
        return {"first_batch": batch_fingerprint(self._ahead), **facts}

    def state_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        if self._saved is not None:
            return self._saved | {"next": self._next, "taken": self._taken}
        return {"next": self._next, "taken": 0, "last_id": self._last_id, "stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._next, self._last_id = state["next"], state["last_id"]
        self._ahead, self._saved, self._taken = self._ahead[:0], None, 0
        if state["taken"]:
            self._read(state["taken"])


def build_sampler(data: TokenData, seq_len: int, data_seed: int, sampling: SamplingConfig) -> Sampler:
    """What the configuration asks for; ConfigError where a stream cannot do it."""
    if data.stream is not None:
        if sampling.name == "random_window":
            raise ConfigError(
                "sampling=random_window: a stream is read in its own order; set data.shuffle_buffer, or "
                "data.streaming=false"
            )
        return StreamSampler(data.stream(data_seed), seq_len)
    kind = {"permutation": TrainSampler, "random_window": RandomWindows}[sampling.name]
    return kind(data.train, seq_len, data_seed)
