"""Seconds from the command to the end of the first step, and of --help, in fresh processes (warm disk cache)."""

import statistics
import subprocess
import sys
import tempfile
import time

ONE_STEP = [
    "trainer.max_steps=1",
    "trainer.eval_sequences=1",
    "diagnostics.probe_sequences=1",
    "trainer.save_weights=false",
]
COMMANDS = {
    "--help": ["--help"],
    "train --help": ["train", "--help"],
    "first step, tracking=local": ["train", *ONE_STEP, "tracking=local"],
    "first step, tracking=wandb offline": ["train", *ONE_STEP, "tracking.mode=offline"],
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in COMMANDS.items():
            seconds = []
            for _ in range(5):
                started = time.perf_counter()
                command = [sys.executable, "-m", "stability_lab", *arguments]
                subprocess.run(command, cwd=folder, check=True, capture_output=True)
                seconds.append(time.perf_counter() - started)
            print(f"{name:<36} {statistics.median(seconds):.2f} s (median of 5)")


if __name__ == "__main__":
    main()
