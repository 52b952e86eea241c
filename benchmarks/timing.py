"""What the benchmarks of time share: variants that take turns, ratios with intervals, the machine, text and JSON.

The first variant is the baseline. It takes part twice, and the ratio of its second part ("again") to the first shows
what the measurement resolves: a difference within that interval is none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stability_lab.config import ConfigError, Parser
from stability_lab.machine.cores import cores
from stability_lab.text import Table, room, text_table
from stability_lab.tracking.manifest import git_state

ROOT = Path(__file__).resolve().parents[1]
AGAIN = " again"
# What decides how fast products in fp32 and bf16 are.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


class Ratio(NamedTuple):
    """Median over rounds, and an interval that holds the true median with 95% or more (fewer than 6 rounds: less)."""

    median: float
    low: float
    high: float


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """seconds / baseline of each round; the interval lies between two order statistics (of few rounds: all)."""
    ratios = np.sort(np.asarray(seconds) / np.asarray(baseline))
    n, below, k = len(ratios), 1, 0  # in how many of 2^n cases k or fewer values lie below the true median
    while below <= 0.025 * 2**n:
        k += 1
        below += math.comb(n, k)
    k = max(k, 1)
    return Ratio(float(np.median(ratios)), float(ratios[k - 1]), float(ratios[-k]))


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, one list a variant; each takes its turn in each round, in an order that turns round.

    The first variant also comes last, as `NAME again`. `time.process_time` is for one thread beside other work.
    """
    baseline = next(iter(variants))
    calls = {**variants, baseline + AGAIN: variants[baseline]}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-warmup, rounds):
        for name in calls if number % 2 else reversed(calls):
            started = clock()
            calls[name]()
            if number >= 0:
                seconds[name].append(clock() - started)
    return seconds


@dataclass
class Group:
    """Rows of one table, each a mapping from a column's name to a value; the columns are those of the first row."""

    title: str
    rows: list[dict[str, Any]]
    note: str = ""

    def add(self, column: str, value: Callable[[Mapping[str, Any]], float | None]) -> Group:
        for row in self.rows:
            row[column] = value(row)
        return self

    def text(self) -> str:
        header = tuple(name for name in self.rows[0] if name not in ("low", "high"))
        rows = tuple(tuple(_cell(name, row) for name in header) for row in self.rows)
        return text_table(Table(self.title, header, rows, (self.note,) if self.note else ()), room())


def group(title: str, seconds: Mapping[str, Sequence[float]], *, speed: bool = False, note: str = "") -> Group:
    """Median seconds of each variant, and its `time` as a multiple of the first variant's, or its `speed`."""
    first = next(iter(seconds.values()))
    rows = []
    for name, taken in seconds.items():
        middle, low, high = ratio(first, taken) if speed else ratio(taken, first)
        rows.append({"name": name, "seconds": float(np.median(taken)), "speed" if speed else "time": middle})
        rows[-1] |= {"low": low, "high": high}
    return Group(title, rows, note)


# Linux counts the memory of the process that starts another as that one's own, and ours holds torch: so a small process
# starts it, and says what it took.
_STARTER = """
import os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
words = [sys.executable, *sys.argv[1:]]
_, status, usage = os.wait4(os.posix_spawn(sys.executable, words, os.environ, file_actions=quiet), 0)
print(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Command:
    """A Python process to run to its end; `peak_mib` is the largest resident memory that one of its runs had."""

    def __init__(self, *words: str, cwd: Path | None = None, after: Callable[[], object] = lambda: None):
        self.words, self.cwd, self.after, self.peak_mib = words, cwd, after, 0.0

    def __call__(self) -> None:
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        command = [sys.executable, "-I", "-S", "-c", _STARTER, *self.words]
        done = subprocess.run(command, cwd=self.cwd, env=surroundings, stdout=subprocess.PIPE, check=True)
        self.peak_mib = max(self.peak_mib, int(done.stdout) / 2**20)
        self.after()


def parser(module: str, description: str | None, *, rounds: int, quick: Mapping[str, Any]) -> Parser:
    """The arguments that all have; `quick` holds what `--quick` changes, where the command line says nothing else."""
    summary = (description or "").partition("\n\n")[0]
    made = Parser(prog=f"python -m {module}", description=summary, allow_abbrev=False)
    made.set_defaults(changed_by_quick=dict(quick))
    made.add_argument("--rounds", type=positive, default=rounds, metavar="N", help="default: %(default)s")
    made.add_argument("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help="of torch")
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds: below 50 s on two cores")
    made.add_argument("--json", type=Path, metavar="FILE", help="write results, settings and machine there")
    return made


def add_cpu_time(parser: Parser) -> None:
    """An option of benchmarks that compute in this process; `clock` is what it chooses."""
    parser.add_argument("--cpu-time", action="store_true", help="of this process: for one thread beside other work")


def clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if args.cpu_time else time.perf_counter


def positive(text: str) -> int:
    """An argument's type: argparse names the argument in the sentence that the ValueError becomes."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(parser: Parser, argv: Sequence[str] | None, measured: Callable[[argparse.Namespace], Iterable[Group]]) -> int:
    """Print each table once it is there, and write the JSON; 2 and one sentence where an argument is wrong."""
    try:
        args = _parsed(parser, argv)
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of processes that are started
        found, before = [], machine()
        print(text_of(before))
        for table in measured(args):
            print(f"\n{table.text()}", flush=True)
            found.append({"title": table.title, "rows": table.rows})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items() if key != "json"}
        report = {"benchmark": parser.prog.rpartition(".")[2], "settings": settings, "machine": before, "groups": found}
        report["load_after"] = _load()
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _parsed(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**args.changed_by_quick)
        args = parser.parse_args(argv)
    vars(args).pop("changed_by_quick")
    if args.json and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {args.json}: the folder {args.json.parent} is not there; make it first")
    if args.json and (args.json.is_dir() or not os.access(args.json.resolve().parent, os.W_OK)):
        raise ConfigError(f"--json {args.json}: is no file that can be written; name another one")
    return args


def machine() -> dict[str, Any]:
    """What times depend on beside the code."""
    names, flags = [platform.processor() or platform.machine()], set()
    if Path("/proc/cpuinfo").exists():
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()]
        facts = {key.strip(): value.strip() for key, _, value in lines}
        names, flags = [facts.get("model name", names[0])], set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0],
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": _load(),
        "git": git_state(ROOT),
    }


def text_of(machine: Mapping[str, Any]) -> str:
    load = "unknown" if machine["load"] is None else f"{machine['load']:.1f}"
    words = [machine["cpu"], " ".join(machine["instructions"]), f"{machine['cores']} cores"]
    words += [f"{machine['threads']} threads", machine["gpu"] or "no GPU", f"torch {machine['torch']}", f"load {load}"]
    return ", ".join(word for word in words if word)


def _load() -> float | None:
    """Processes that wanted to run, on average over the last minute."""
    return os.getloadavg()[0] if sys.platform != "win32" else None


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name in ("speed", "time"):
        return f"{value:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    if name == "seconds" and value < 1:
        return f"{1e3 * value:.3f} ms"
    if name == "seconds":
        return f"{value:.2f} s"
    return f"{value:.1%}" if name.startswith("share") else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
