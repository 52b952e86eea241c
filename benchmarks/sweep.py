"""A sweep, from the keystroke to the table: the default against one run after the other.

python benchmarks/sweep.py [--runs 8] [--steps 60] [--rounds 3] [--beside 1] [--quick] [--json]

`processes`: a command for each run, as without `-m`. `one process`: `-m sweep.workers=1`. `default`: `-m`. Each variant
takes its turn in each round; the ratio is that of a round. `--beside N` keeps N other processes busy meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from timing import interleaved, ratio

SMALL = ("model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.seq_len=64", "trainer.micro_batch_size=8")


def command(folder: Path, steps: int, small: bool, *words: str) -> list[str]:
    size = SMALL if small else ()
    fixed = (f"trainer.max_steps={steps}", "trainer.eval_every=null", "tracking=local", f"output_dir={folder}")
    return [sys.executable, "-m", "stability_lab", "train", *size, *fixed, "if_exists=new", *words]


def variants(folder: Path, runs: int, steps: int, small: bool) -> dict[str, Callable[[], None]]:
    def call(*words: str) -> None:
        subprocess.run(command(folder, steps, small, *words), check=True, capture_output=True)

    seeds = ",".join(map(str, range(runs)))

    def processes() -> None:
        for seed in range(runs):
            call(f"seed={seed}")
        shutil.rmtree(folder)

    def sweep(*words: str) -> Callable[[], None]:
        def run() -> None:
            call("-m", f"seed={seeds}", *words)
            shutil.rmtree(folder)

        return run

    return {"processes": processes, "one process": sweep("sweep.workers=1"), "default": sweep()}


@contextmanager
def busy(n: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A sweep, from the keystroke to the table.")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="d 64 instead of gpt_nano")
    parser.add_argument("--quick", action="store_true", help="two small runs of 20 steps, one round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.steps, args.rounds, args.small = 2, 20, 1, True
    with tempfile.TemporaryDirectory() as name, busy(args.beside):
        seconds = interleaved(variants(Path(name) / "out", args.runs, args.steps, args.small), args.rounds, warmup=0)
    found = {}
    for variant, taken in seconds.items():
        middle, low, high = ratio(seconds["processes"], taken) if args.rounds > 1 else (0.0, 0.0, 0.0)
        if args.rounds == 1:
            middle = low = high = seconds["processes"][0] / taken[0]
        found[variant] = {"seconds": statistics.median(taken), "times": middle, "low": low, "high": high}
    if args.json:
        print(json.dumps({**vars(args), "found": found}))
        return
    print(f"{args.runs} runs of {args.steps} steps, {args.rounds} rounds, {args.beside} busy processes beside")
    for variant, row in found.items():
        times = f"{row['times']:.2f} ({row['low']:.2f} to {row['high']:.2f}) times as fast"
        print(f"{variant:<12} {row['seconds']:6.1f} s  {times}")


if __name__ == "__main__":
    main()
