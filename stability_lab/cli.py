"""Command line: takes the sub-command off and imports what it needs, so that --help answers at once."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from stability_lab import __version__, console
from stability_lab.config import ConfigError, did_you_mean, printable

USAGE = f"""stability-lab {__version__}: which stabilizer does my model need, what does it cost, how sure can I be?

  python -m stability_lab train [+stabilizer=NAME] [key=value ...]   train one run; -m sweeps over a,b,c values
  python -m stability_lab plan [the same as train]                   what that would cost: size, memory, time; -m too
  python -m stability_lab evaluate RUN [--batch-size N]              validation loss of a finished run's weights
  python -m stability_lab compare PATH... [--figures DIR]            a sweep's runs: tables, intervals, a decision
  python -m stability_lab runs [DIR] [--status S]                    all runs that are found
  python -m stability_lab score FILE... [--metric COLUMN]            spikes, events and verdict of anybody's log
  python -m stability_lab sync PATH... [--dry-run]                   uploads offline runs to W&B, each part once
  python -m stability_lab stabilizers                                what there is to choose from

Each command explains itself with --help. Exit codes: 0 ok, 1 failed, 2 bad input, 3 diverged, 130 Ctrl-C, 143 SIGTERM.
"""
# Command -> the module whose `main(arguments)` does it.
COMMANDS = {
    "train": "launch",
    "plan": "plan",
    "evaluate": "evaluate",
    "compare": "compare",
    "runs": "runs",
    "score": "score",
    "sync": "sync",
    "stabilizers": "listing",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Console script `stability-lab`; ends the process with the documented exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    console.set_up()
    try:
        return _dispatch(argv[0], argv[1:])
    except ConfigError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


def _dispatch(command: str, arguments: Sequence[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"{command} is not a command: {did_you_mean(command, COMMANDS)}")
    return importlib.import_module(f"stability_lab.{COMMANDS[command]}").main(arguments)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
