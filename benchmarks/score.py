"""How long `score` takes for a CSV of a million rows, and how much memory, against pandas that only reads it.

    python -m benchmarks.score

Time and memory are those of a whole process. The goals are 3 s and 300 MiB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.timing import AGAIN, Command, Group, group, interleaved, parser, positive, run


def write_log(path: Path, rows: int) -> None:
    """Step, loss, learning rate and gradient norm of a run that is stable."""
    rng = np.random.default_rng(0)
    step = np.arange(1, rows + 1)
    loss = 2 + 3 * np.exp(-step / (rows / 10)) + rng.normal(0, 0.02, rows)
    columns = np.stack([step, loss, np.full(rows, 1e-3), np.exp(rng.normal(0, 0.3, rows))], axis=1)
    np.savetxt(path, columns, "%d,%.6f,%.6g,%.6f", header="step,train/loss,lr,grad_norm", comments="")


def measured(args: argparse.Namespace) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        write_log(path, args.rows)
        size = path.stat().st_size / 1e6
        calls = {
            "pandas.read_csv": Command("-c", f"import pandas; pandas.read_csv({str(path)!r})"),
            "score": Command("-m", "stability_lab", "score", str(path)),
        }
        seconds = interleaved(calls, args.rounds, warmup=1)
    peaks = {name: call.peak_mib for name, call in calls.items()}
    table = group(f"A CSV of {args.rows:,} rows, {size:.0f} MB", seconds)
    yield table.add("peak MiB", lambda row: peaks[row["name"].removesuffix(AGAIN)])


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("benchmarks.score", __doc__, rounds=7, quick={"rows": 200_000, "rounds": 3})
    made.add_argument("--rows", type=positive, default=1_000_000, metavar="N", help="default: %(default)s")
    return run(made, argv, measured)


if __name__ == "__main__":
    sys.exit(main())
