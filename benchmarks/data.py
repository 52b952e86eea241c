"""What a batch costs, only reading windows of ids, against windows that are copied one by one. The goal is 0.1 ms.

python -m benchmarks.data          200 million ids in a temporary folder (400 MB)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import Group, group, interleaved, parser, positive, run
from stability_lab.data.loader import RandomWindows, TrainSampler
from stability_lab.data.repeats import repetitive
from stability_lab.data.tokens.formats import recognise
from stability_lab.data.tokens.shards import Shards

SHARDS = 20
SHAPES = ((16, 64), (16, 1024), (64, 1024))


def measured(args: argparse.Namespace) -> Iterator[Group]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        with path.open("wb") as file:
            for _ in range(SHARDS):
                rng.integers(0, 50_257, args.tokens // SHARDS, dtype=np.uint16).tofile(file)
        ids = recognise(path, "uint16").region.map()
        parts = Shards(np.split(ids, SHARDS))
        for n, seq_len in SHAPES:
            samplers = {
                "permutation": TrainSampler(ids, seq_len, 0),
                f"permutation, {SHARDS} shards": TrainSampler(parts, seq_len, 0),
                "random windows": RandomWindows(ids, seq_len, 0),
            }
            batch = samplers["permutation"].batch(0, n)
            calls: dict[str, Callable[[], object]] = {"one by one": one_by_one(ids, n, seq_len)}
            calls |= {name: reader(sampler, n) for name, sampler in samplers.items()}
            calls["masking of repeats"] = lambda batch=batch: repetitive(batch)
            yield group(f"A batch of {n} x {seq_len:,} ids", interleaved(calls, args.rounds))


def one_by_one(ids: np.ndarray, n: int, seq_len: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)

    def read() -> torch.Tensor:
        starts = rng.integers(0, len(ids) - seq_len - 1, n)
        return torch.stack([torch.from_numpy(ids[i : i + seq_len + 1].astype(np.int64)) for i in starts])

    return read


def reader(sampler: TrainSampler | RandomWindows, n: int) -> Callable[[], object]:
    steps = iter(range(1, 10**9))
    return lambda: sampler.batch(n * next(steps), n)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.data", __doc__, rounds=401, quick={"rounds": 101, "tokens": 20_000_000})
    made.add_argument("--tokens", type=positive, default=200_000_000, metavar="N", help="default: %(default)s")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
