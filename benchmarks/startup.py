"""From the command to the end of the first step, and of --help, in fresh processes: as multiples of `import torch`.

    python -m benchmarks.startup --rounds 7

A run more in a warm process: six of one step in one worker take so much longer than one, and a fifth of that counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.timing import Command, Group, group, interleaved, parser, run

ONE_STEP = (
    "trainer.max_steps=1",
    "trainer.eval_sequences=1",
    "diagnostics.probe_sequences=1",
    "trainer.save_weights=false",
)
CHECK = """
from stability_lab.build import check
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
words = "-m +stabilizer=none,qknorm,zloss,softcap,rmsnorm optimizer.lr=1e-3,3e-3,1e-2,3e-2,1e-1 seed=range(20)"
jobs = compose_jobs(read_command_line(words.split()))
assert len(jobs) == 500
check(job.config for job in jobs)
"""
LAB = ("-m", "stability_lab")
WARM = (*LAB, "train", "-m", *ONE_STEP, "tracking=local", "sweep.workers=1", "if_exists=new")
ONE, SIX = "sweep of one run", "sweep of six runs"
COMMANDS = {
    "import torch": ("-c", "import torch"),
    "--help": (*LAB, "--help"),
    "train --help": (*LAB, "train", "--help"),
    "first step, tracking=local": (*LAB, "train", *ONE_STEP, "tracking=local"),
    "first step, W&B offline": (*LAB, "train", *ONE_STEP, "tracking.mode=offline"),
    "500 jobs of a sweep, checked": ("-c", CHECK),
    ONE: (*WARM, "seed=range(1)"),
    SIX: (*WARM, "seed=range(6)"),
}


def measured(args: argparse.Namespace) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: Command(*words, cwd=Path(folder)) for name, words in COMMANDS.items()}
        seconds = interleaved(calls, args.rounds, warmup=args.warmup)
    seconds["a further run, warm"] = [(six - one) / 5 for one, six in zip(seconds[ONE], seconds[SIX], strict=True)]
    yield group("Processes from start to end", seconds)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.startup", __doc__, rounds=7, quick={"rounds": 1, "warmup": 0})
    made.set_defaults(warmup=1)
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
