"""A sweep, from the keystroke to the table: the default against one run after the other.

    python -m benchmarks.sweep                       8 runs of 60 steps of gpt_nano
    python -m benchmarks.sweep --small --beside 1    d 64, while another process is busy

`processes`: a command for each run, as without `-m`. `one process`: `-m sweep.workers=1`. `default`: `-m`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.timing import Command, Group, group, interleaved, parser, positive, run

SMALL = ("model.d_model=64", "model.n_layers=2", "model.n_heads=2", "model.seq_len=64", "trainer.micro_batch_size=8")


def variants(folder: Path, runs: int, steps: int, small: bool) -> dict[str, Callable[[], None]]:
    fixed = (f"trainer.max_steps={steps}", "trainer.eval_every=null", "tracking=local", f"output_dir={folder}")
    train = ("-m", "stability_lab", "train", *(SMALL if small else ()), *fixed, "if_exists=new")

    def remove() -> None:
        shutil.rmtree(folder)

    def processes() -> None:
        for seed in range(runs):
            Command(*train, f"seed={seed}")()
        remove()

    sweep = (*train, "-m", f"seed=range({runs})")
    return {
        "processes": processes,
        "one process": Command(*sweep, "sweep.workers=1", after=remove),
        "default": Command(*sweep, after=remove),
    }


@contextmanager
def busy(n: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(args: argparse.Namespace) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as name, busy(args.beside):
        seconds = interleaved(variants(Path(name) / "out", args.runs, args.steps, args.small), args.rounds, warmup=0)
    what = f"{args.runs} runs of {args.steps} steps, {'d 64' if args.small else 'gpt_nano'}"
    yield group(f"{what}, {args.beside} busy processes beside", seconds, speed=True)


def main(argv: Sequence[str] | None = None) -> int:
    quick = {"runs": 2, "steps": 20, "rounds": 1, "small": True}
    made = parser("benchmarks.sweep", __doc__, rounds=3, quick=quick)
    made.add_argument("--runs", type=positive, default=8, metavar="N", help="default: %(default)s")
    made.add_argument("--steps", type=positive, default=60, metavar="N", help="default: %(default)s")
    made.add_argument("--beside", type=int, choices=range(9), default=0, metavar="N", help="busy processes meanwhile")
    made.add_argument("--small", action="store_true", help="d 64 instead of gpt_nano")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
