"""Sources whose entropy is known, so that the distance of a loss to the best possible one is known too.

Ids are drawn, not encoded. Beside each id of the validation split stands its surprisal: -ln of its probability under
the source, given all that came before. The mean over the validation targets is what a perfect model would score on
exactly those tokens, so the distance to it carries none of their sampling noise. Data depends on `source_seed` alone;
the order of the samples on the run's data seed, as always.

The Markov source needs one id of context, so its optimum can be reached. Where a document of the copy or the recall
task is cut by a window's start, what was cut away cannot be recalled: there the optimum is a bound.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from stability_lab.data.source import TokenData
from stability_lab.data.tokenizer import TokenizerOptions
from stability_lab.data.tokens.memmap import entropy, ids_dtype


class Drawn(NamedTuple):
    """Ids and the surprisal of each in nats, shape (n,) both."""

    ids: npt.NDArray[np.integer]
    surprisal: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Markov:
    """Each id depends on the one before it, through a transition matrix whose rows are Dirichlet(concentration).

    A small concentration gives few likely successors and a low entropy; infinity would give ln(vocab_size).
    """

    name: ClassVar[str] = "synthetic"
    vocab_size: int = 64
    concentration: float = 0.1
    tokens: int = 4_000_000
    val_tokens: int = 200_000
    source_seed: int = 0

    def __post_init__(self) -> None:
        _check(self, vocab_size=(2, 4096))
        if not 1e-3 <= self.concentration <= 1e3:
            raise ValueError(f"concentration={self.concentration:g}: must be 0.001 to 1000")

    def transitions(self) -> npt.NDArray[np.float64]:
        """P(next | one before), shape (V, V). No entry is 0, so that every chain reaches every id."""
        rng = _generator(self, "transitions")
        rows = rng.dirichlet(np.full(self.vocab_size, self.concentration), self.vocab_size) + 1e-9
        return rows / rows.sum(1, keepdims=True)

    def entropy_rate(self) -> float:
        """Nats a token: sum over ids of their stationary probability times the entropy of their successor."""
        p = self.transitions()
        return float(-(stationary(p) @ (p * np.log(p)).sum(1)))

    def draw(self, split: str, n: int) -> Drawn:
        p, rng = self.transitions(), _generator(self, split)
        cumulative = np.cumsum(p, axis=1)
        cumulative[:, -1] = 1.0
        rows = cumulative.tolist()
        first = int(np.searchsorted(np.cumsum(stationary(p))[:-1], rng.random()))
        # The chain is sequential; bisection in a list is the fastest step that Python has.
        chain = itertools.accumulate(rng.random(n - 1).tolist(), lambda i, u: bisect_right(rows[i], u), initial=first)
        ids = np.fromiter(chain, dtype=np.int64, count=n)
        surprisal = np.empty(n)
        surprisal[0], surprisal[1:] = -math.log(stationary(p)[first]), -np.log(p[ids[:-1], ids[1:]])
        return Drawn(ids, surprisal)

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        return _load(self)


@dataclass(frozen=True)
class Copy:
    """Documents `start, s1 ... sn, copy, s1 ... sn` of uniform symbols: the second half is known."""

    name: ClassVar[str] = "synthetic_copy"
    symbols: int = 64
    length: int = 16
    tokens: int = 4_000_000
    val_tokens: int = 200_000
    source_seed: int = 0

    def __post_init__(self) -> None:
        _check(self, symbols=(2, 65_000), length=(1, 10_000))

    @property
    def vocab_size(self) -> int:
        """The symbols, `start` (the last but one) and `copy`."""
        return self.symbols + 2

    def entropy_rate(self) -> float:
        return self.length * math.log(self.symbols) / (2 * self.length + 2)

    def draw(self, split: str, n: int) -> Drawn:
        documents = -(-n // (2 * self.length + 2))
        symbols = _generator(self, split).integers(0, self.symbols, (documents, self.length))
        start, mark = (np.full((documents, 1), self.symbols + i) for i in (0, 1))
        ids = np.concatenate([start, symbols, mark, symbols], axis=1)
        nats = np.zeros(ids.shape[1])
        nats[1 : 1 + self.length] = math.log(self.symbols)
        return Drawn(ids.reshape(-1)[:n], np.tile(nats, documents)[:n])

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        return _load(self, start_id=self.symbols)


@dataclass(frozen=True)
class Induction:
    """Documents `start, k1 v1 ... km vm, q1 a1 ... qm am`: pairs, then the keys in another order with their values.

    What stands after a key the second time is what stood there the first time: the pattern that induction heads
    complete (arXiv:2209.11895). Keys of a document differ; keys and values have ids of their own.
    """

    name: ClassVar[str] = "synthetic_induction"
    keys: int = 64
    values: int = 64
    pairs: int = 8
    tokens: int = 4_000_000
    val_tokens: int = 200_000
    source_seed: int = 0

    def __post_init__(self) -> None:
        _check(self, keys=(1, 32_000), values=(2, 32_000), pairs=(1, 10_000))
        if self.pairs > self.keys:
            raise ValueError(f"pairs={self.pairs}: must be at most data.keys={self.keys}, since keys differ")

    @property
    def vocab_size(self) -> int:
        """The keys, the values and `start`, the last."""
        return self.keys + self.values + 1

    def entropy_rate(self) -> float:
        """[ln(K! / (K-m)!) + m ln V + ln m!] / (4m + 1)"""
        k, m = self.keys, self.pairs
        nats = math.lgamma(k + 1) - math.lgamma(k - m + 1) + m * math.log(self.values) + math.lgamma(m + 1)
        return nats / (4 * m + 1)

    def draw(self, split: str, n: int) -> Drawn:
        rng, m = _generator(self, split), self.pairs
        documents = -(-n // (4 * m + 1))
        keys = rng.random((documents, self.keys)).argsort(1)[:, :m]
        values = rng.integers(self.keys, self.keys + self.values, (documents, m))
        order = rng.random((documents, m)).argsort(1)
        pairs = np.stack([keys, values], axis=2)
        again = np.take_along_axis(pairs, order[:, :, None], axis=1)
        start = np.full((documents, 1), self.vocab_size - 1)
        ids = np.concatenate([start, pairs.reshape(documents, -1), again.reshape(documents, -1)], axis=1)
        nats = np.zeros(4 * m + 1)
        nats[1 : 2 * m : 2] = np.log(self.keys - np.arange(m))
        nats[2 : 2 * m + 1 : 2] = math.log(self.values)
        nats[2 * m + 1 :: 2] = np.log(m - np.arange(m))
        return Drawn(ids.reshape(-1)[:n], np.tile(nats, documents)[:n])

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        return _load(self, start_id=self.vocab_size - 1)


@dataclass(frozen=True)
class ModularAddition:
    """a, b, c, a, b, c, ... with c = (a + b) mod `modulus`: a share of all pairs to train on. Validation
    reads the others, or without `held_out` the same.

    c is fitted exactly. With model.seq_len=3 and objective.prompt=2 a window is some sum, a pair and the pair's sum,
    which alone is predicted, and an epoch is one batch of all pairs (arXiv:2201.02177, arXiv:2206.04817).
    """

    name: ClassVar[str] = "modular_addition"
    modulus: int = 23
    share: float = 0.5
    held_out: bool = True
    source_seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.modulus <= 1000:
            raise ValueError(f"modulus={self.modulus}: must be 2 to 1000")
        if not 1 <= self.pairs <= self.modulus**2 - self.held_out:
            raise ValueError(f"share={self.share:g}: must give 1 to {self.modulus**2 - self.held_out} pairs")

    @property
    def vocab_size(self) -> int:
        return self.modulus

    @property
    def pairs(self) -> int:
        """Pairs to train on."""
        return round(self.share * self.modulus**2)

    @property
    def tokens(self) -> int:
        return 3 * self.pairs + 1

    @property
    def val_tokens(self) -> int:
        return 3 * (self.modulus**2 - self.pairs if self.held_out else self.pairs) + 1

    def entropy_rate(self) -> float:
        return 2 / 3 * math.log(self.modulus)

    def draw(self, split: str, n: int) -> Drawn:
        order = _generator(self, "pairs").permutation(self.modulus**2)
        others = split == "val" and self.held_out
        a, b = np.divmod(order[self.pairs :] if others else order[: self.pairs], self.modulus)
        ids = np.insert(np.stack([a, b, (a + b) % self.modulus], axis=1), 0, 0)  # a window begins with an id before a
        nats = np.where(np.arange(len(ids)) % 3, math.log(self.modulus), 0.0)
        return Drawn(ids[:n], nats[:n])

    def load(self, tokenizer: TokenizerOptions) -> TokenData:
        return _load(self)


def stationary(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The distribution with pi P = pi, shape (V,), of a matrix without zeros."""
    n = len(p)
    equations = np.vstack([p.T - np.eye(n), np.ones(n)])
    solution, *_ = np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)
    return solution.astype(np.float64)


@functools.lru_cache(maxsize=2)  # a command composes, checks and builds, each time from the same few options
def _load(source: Markov | Copy | Induction | ModularAddition, start_id: int | None = None) -> TokenData:
    dtype = ids_dtype(source.vocab_size)
    train, val = source.draw("train", source.tokens), source.draw("val", source.val_tokens)
    ids = train.ids.astype(dtype)
    digest = hashlib.sha256(ids.tobytes() + val.ids.astype(dtype).tobytes()).hexdigest()
    about: dict[str, str | int] = {
        "name": source.name,
        "version": "drawn, no tokenizer",
        "sha256": digest,
        "source": repr(source),
        "licence": "none needed",
    }
    return TokenData(
        train=ids,
        val=val.ids.astype(dtype),
        vocab_size=source.vocab_size,
        eos_id=start_id,
        eos_first=start_id is not None,
        unigram_entropy=entropy(np.bincount(ids)),
        corpus=about,
        fingerprint=digest,
        entropy_rate=source.entropy_rate(),
        val_surprisal=val.surprisal,
    )


def _generator(source: Any, purpose: str) -> np.random.Generator:
    """Philox keyed by the seed and what the numbers are for: the splits share nothing."""
    word = int.from_bytes(hashlib.sha256(f"{source.name}/{purpose}".encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=np.array([source.source_seed % 2**64, word], dtype=np.uint64)))


def _check(source: Any, **bounds: tuple[int, int]) -> None:
    for key, (low, high) in (bounds | {"tokens": (2, 10**9), "val_tokens": (2, 10**8)}).items():
        value = getattr(source, key)
        if not low <= value <= high:
            raise ValueError(f"{key}={value}: must be {low} to {high}")
