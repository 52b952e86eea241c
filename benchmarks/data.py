"""What a batch costs: fingerprints aside, only reading windows of ids. The goal is less than 0.1 ms a batch."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from timing import interleaved

from stability_lab.data.loader import RandomWindows, TrainSampler
from stability_lab.data.repeats import repetitive
from stability_lab.data.tokens.formats import recognise
from stability_lab.data.tokens.shards import Shards

TOKENS, SHARDS, ROUNDS = 200_000_000, 20, 400
SHAPES = ((16, 64), (16, 1024), (64, 1024))


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        with path.open("wb") as file:
            for _ in range(SHARDS):
                rng.integers(0, 50_257, TOKENS // SHARDS, dtype=np.uint16).tofile(file)
        ids = recognise(path, "uint16").region.map()
        parts = Shards(np.split(ids, SHARDS))
        for n, seq_len in SHAPES:
            started = time.perf_counter()
            samplers = {
                "permutation": TrainSampler(ids, seq_len, 0),
                f"permutation, {SHARDS} shards": TrainSampler(parts, seq_len, 0),
                "random_window": RandomWindows(ids, seq_len, 0),
            }
            for sampler in samplers.values():
                sampler.batch(0, n)
            first = time.perf_counter() - started
            calls = {name: reader(sampler, n) for name, sampler in samplers.items()}
            batch = samplers["permutation"].batch(0, n)
            calls["mask_repeats"] = lambda batch=batch: repetitive(batch)
            for name, seconds in interleaved(calls, ROUNDS).items():
                low, middle, high = (1e3 * q for q in statistics.quantiles(seconds, n=4))
                print(f"{n:>3} x {seq_len:<5} {name:<24} {middle:.4f} ms ({low:.4f} to {high:.4f})")
            print(f"{n:>3} x {seq_len:<5} first batch of all three, permutations drawn: {first:.2f} s")


def reader(sampler: TrainSampler | RandomWindows, n: int) -> Callable[[], object]:
    steps = iter(range(1, 10**9))
    return lambda: sampler.batch(n * next(steps), n)


if __name__ == "__main__":
    main()
