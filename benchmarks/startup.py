"""From the command to the end of the first step, and of --help, in fresh processes: as multiples of `import torch`.

python benchmarks/startup.py [--rounds 7] [--quick] [--json]

Each command takes its turn in each round. `import torch again` is the same as the first: its ratio is the resolution.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

from timing import interleaved

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
IMPORT = ("-c", "import torch")
LAB = ("-m", "stability_lab")
COMMANDS = {
    "import torch": IMPORT,
    "import torch again": IMPORT,
    "--help": (*LAB, "--help"),
    "train --help": (*LAB, "train", "--help"),
    "first step, tracking=local": (*LAB, "train", *ONE_STEP, "tracking=local"),
    "500 jobs of a sweep, checked": ("-c", CHECK),
    "first step, W&B offline": (*LAB, "train", *ONE_STEP, "tracking.mode=offline"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="From the command to the first step.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def call(words: tuple[str, ...]) -> Callable[[], object]:
            return lambda: subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)

        seconds = interleaved(
            {n: call(words) for n, words in COMMANDS.items()}, 2 if args.quick else args.rounds, warmup=1
        )
    found = {}
    for name, taken in seconds.items():
        times = sorted(t / base for t, base in zip(taken, seconds["import torch"], strict=True))
        found[name] = {"seconds": statistics.median(taken), "times": statistics.median(times), "most": times[-1]}
    if args.json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(f"{name:<28} {row['seconds']:6.2f} s  {row['times']:.2f} times import torch (at most {row['most']:.2f})")


if __name__ == "__main__":
    main()
