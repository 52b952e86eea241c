"""Windows of tokens: which tokens sample i is, and which windows validation reads.

A window is seq_len + 1 ids: the inputs are all but the last, the targets all but the first. Sample i is a
pure function of (data seed, i), so runs that differ only in stabilizers, micro-batch, accumulation or number
of ranks read the same samples, and a resumed run needs no loader state. Only ids that come in one order, from a
stream, have one.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from stability_lab.config import ConfigError, SamplingConfig
from stability_lab.data.source import TokenData, TokenStream
from stability_lab.data.tokens.shards import Ids, Tokens, windows_of


class Sampler(ABC):
    """Training samples, seq_len + 1 ids each, numbered from 0."""

    @abstractmethod
    def batch(self, first: int, n: int) -> Ids:
        """Samples first, ..., first + n - 1, shape (n, seq_len + 1)."""

    @abstractmethod
    def describe(self, per_step: int, max_steps: int) -> dict[str, str]:
        """What the manifest holds: fingerprints of what the run reads, and how it continues after an interruption."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside the number of samples so far, as JSON can hold it: nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the last sample that had been given out when `state` was saved."""
        if state:
            raise ValueError("the checkpoint has the place in a stream, and this run reads none")


class WindowSampler(Sampler):
    """A sampler whose sample i can be read at any time, so that it has no state."""

    def __init__(self, tokens: Tokens, seq_len: int, data_seed: int) -> None:
        assert len(tokens) > seq_len > 0, f"{len(tokens)} tokens: too few for seq_len {seq_len}"
        self._seed = data_seed % 2**64
        self._seq_len = seq_len
        self._n_tokens = len(tokens)
        self._windows = windows_of(tokens, seq_len + 1)

    @abstractmethod
    def starts(self, first: int, n: int) -> Ids:
        """Position of the first id of samples first, ..., first + n - 1, shape (n,)."""

    def batch(self, first: int, n: int) -> Ids:
        return self._windows[self.starts(first, n)].astype(np.int64)

    def describe(self, per_step: int, max_steps: int) -> dict[str, str]:
        firsts = {"first_batch": 0, "last_batch": (max_steps - 1) * per_step}
        return {name: batch_fingerprint(self.batch(first, per_step)) for name, first in firsts.items()}


class TrainSampler(WindowSampler):
    """Training samples in random order without replacement, epoch after epoch.

    Windows start at multiples of `seq_len` (a window's last target is the next one's first input), so a token
    is a target at most once an epoch; up to seq_len - 1 ids at the end are never read. Epoch e is a
    permutation drawn from a Philox generator keyed by (data_seed, e). A batch may cross the end of an epoch.
    """

    def __init__(self, tokens: Tokens, seq_len: int, data_seed: int) -> None:
        super().__init__(tokens, seq_len, data_seed)
        self._permutations: dict[int, Ids] = {}

    @property
    def n_windows(self) -> int:
        """Samples in an epoch."""
        return (self._n_tokens - 1) // self._seq_len

    def starts(self, first: int, n: int) -> Ids:
        epochs, places = np.divmod(np.arange(first, first + n), self.n_windows)
        starts = np.empty(n, dtype=np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            starts[here] = self._permutation(epoch)[places[here]]
        return starts * self._seq_len

    def _permutation(self, epoch: int) -> Ids:
        if epoch not in self._permutations:
            key = np.array([self._seed, epoch], dtype=np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.n_windows)
            # A batch at the end of an epoch needs two; keeping all would grow with the length of the run.
            newest = sorted(self._permutations)[-1:]
            self._permutations = {e: self._permutations[e] for e in newest} | {epoch: order}
        return self._permutations[epoch]


class RandomWindows(WindowSampler):
    """Training samples that start anywhere, drawn with replacement, as nanoGPT does.

    The start of sample i is a hash of (data_seed, i), so any sample can be read without those before it.
    """

    def starts(self, first: int, n: int) -> Ids:
        offset = _mix(np.array([self._seed], dtype=np.uint64) + _GOLDEN)
        numbers = np.arange(first, first + n, dtype=np.uint64)
        # The remainder favours low positions by len(tokens) / 2^64, which nobody can see.
        return (_mix(numbers + offset) % np.uint64(len(self._windows))).astype(np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64: a one-to-one map of 64-bit numbers whose outputs for 0, 1, 2, ... pass as random."""
    x = x * _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


class StreamSampler(Sampler):
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
        """Samples first, ..., first + n - 1, shape (n, seq_len + 1); ValueError if they are not the next ones."""
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


class JoinedSampler(Sampler):
    """Samples of several windows that lie one behind the other in a row: n, n + 1, ... of `windows`, which has an
    order at random."""

    def __init__(self, windows: WindowSampler, per_sample: int) -> None:
        self._windows, self._per_sample = windows, per_sample

    def batch(self, first: int, n: int) -> Ids:
        return self._windows.batch(first * self._per_sample, n * self._per_sample).reshape(n, -1)

    def describe(self, per_step: int, max_steps: int) -> dict[str, str]:
        return self._windows.describe(per_step * self._per_sample, max_steps)


def build_sampler(
    data: TokenData, seq_len: int, data_seed: int, sampling: SamplingConfig, per_sample: int = 1
) -> Sampler:
    """The sampler that the configuration asks for; ConfigError where a stream cannot do it.

    `per_sample` windows of text are one sample.
    """
    if data.stream is not None:
        if per_sample > 1:
            raise ConfigError(
                "data.streaming=true: this objective joins windows from different places of the text, and a stream "
                "comes in one order; set data.streaming=false, or choose objective=masked_lm"
            )
        if sampling.name == "random_window":
            raise ConfigError(
                "sampling=random_window: a stream is read in its own order; set data.shuffle_buffer, or "
                "data.streaming=false"
            )
        return StreamSampler(data.stream(data_seed), seq_len)
    kind = {"permutation": TrainSampler, "random_window": RandomWindows}[sampling.name]
    windows = kind(data.train, seq_len, data_seed)
    return JoinedSampler(windows, per_sample) if per_sample > 1 else windows


def validation_windows(tokens: Tokens, seq_len: int, n_windows: int, per_sample: int = 1) -> Ids:
    """Fixed windows evenly strided over all of `tokens`, shape (m, seq_len + 1), at `validation_starts`.

    With `per_sample` of them in a row the others follow m / per_sample and more windows later: far away in the text.
    """
    windows = windows_of(tokens, seq_len + 1)[validation_starts(len(tokens), seq_len, n_windows)].astype(np.int64)
    return np.stack(
        [windows, *(np.roll(windows, -(i * len(windows) // per_sample), 0) for i in range(1, per_sample))], 1
    ).reshape(len(windows), -1)


def validation_starts(n_tokens: int, seq_len: int, n_windows: int) -> Ids:
    """Position of each validation window's first id, shape (m,).

    The first is 0 and, from two windows on, the last window ends at the end. m is n_windows, or fewer where the
    tokens do not hold that many without scoring a target twice.
    """
    assert n_tokens > seq_len > 0, f"{n_tokens} tokens: too few for seq_len {seq_len}"
    assert n_windows > 0
    m = min(n_windows, (n_tokens - 1) // seq_len)
    return np.arange(m) * (n_tokens - seq_len - 1) // max(m - 1, 1)


def check_length(data: TokenData, seq_len: int) -> None:
    """Raises ConfigError where a split holds no window of seq_len + 1 ids; it names the one that limits the context."""
    sizes = {} if data.stream else {"training": data.train_tokens}
    sizes["validation"] = data.val_tokens
    split, tokens = min(sizes.items(), key=lambda item: item[1])
    if tokens < seq_len + 1:
        longest = tokens - 1
        fits = f"the longest context that fits this data is {longest}" if longest > 0 else "no context fits; give more"
        raise ConfigError(f"model.seq_len={seq_len}: the {split} split has only {tokens} token(s); {fits}.")


def batch_fingerprint(array: npt.NDArray[np.integer]) -> str:
    """First 16 hex digits of the SHA-256 over the ids as little-endian int64."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()[:16]
