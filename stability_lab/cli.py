"""Command line: takes the sub-command off and imports what it needs, so that --help answers at once."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from stability_lab import __version__
from stability_lab.config import ConfigError, Parser
from stability_lab.plugins.trust import allowing
from stability_lab.run import console
from stability_lab.text import did_you_mean, printable
from stability_lab.training.launched import speaks

USAGE = f"""stability-lab {__version__}: which stabilizer does my model need, what does it cost, how sure can I be?

  python -m stability_lab train [+stabilizer=NAME] [key=value ...]   train one run; -m sweeps over a,b,c values
  python -m stability_lab demo [NAME] [key=value ...]                a run that breaks, and the same run rescued
  python -m stability_lab ladder +stabilizer=A,B [--budget 40m]      the largest stable and best rate of each, few runs
  python -m stability_lab plan [the same as train]                   what that would cost: size, memory, time; -m too
  python -m stability_lab evaluate RUN [--batch-size N]              validation loss of a finished run's weights
  python -m stability_lab compare PATH... [--figures DIR]            a sweep's runs: tables, intervals, a decision
  python -m stability_lab reproduce [NAME]                           a paper's claims, tested: plan, runs, verdicts
  python -m stability_lab gallery [--stressors A,B]                  which stabilizer cures which failure
  python -m stability_lab runs [DIR] [--status S]                    all runs that are found
  python -m stability_lab score FILE... [--metric COLUMN]            spikes, events and verdict of anybody's log
  python -m stability_lab sync PATH... [--dry-run]                   uploads offline runs to W&B, each part once
  python -m stability_lab data prepare [data=... tokenizer=...]      tokenise text once, with several processes
  python -m stability_lab data inspect FILE|RUN                      what is in a token file, or in a run's data
  python -m stability_lab stabilizers [NAME]                         what there is to choose from, or one of them

Your own package: installed with entry points it is found; one that is not needs --allow PACKAGE (docs/own_package.md).
Each command explains itself with --help. Exit codes: 0 ok, 1 failed, 2 bad input, 3 diverged, 130 Ctrl-C, 143 SIGTERM.
"""
# Each is a module of `commands` whose `main(arguments)` does it.
COMMANDS = (
    "train",
    "demo",
    "ladder",
    "plan",
    "evaluate",
    "compare",
    "reproduce",
    "gallery",
    "runs",
    "score",
    "data",
    "sync",
    "stabilizers",
)
# These build what a configuration names, so they take `--allow PACKAGE`.
_BUILDERS = ("train", "ladder", "plan", "evaluate", "data", "stabilizers")
# Of a path that cannot be looked at.
_NO_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
# Of a file or a standard output that takes no more.
_NO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> None:
    """Console script `stability-lab`; ends the process with the documented exit code."""
    code = run(sys.argv[1:] if argv is None else list(argv))
    if sys.stdout is not None:  # closed by whoever started us
        try:
            sys.stdout.flush()
        except OSError:
            # `run` has said so; Python would try again at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    try:
        code = _run(argv)
        print(end="", flush=True)
        return code
    except ConfigError as error:
        if speaks():
            print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in _NO_PATH and error.filename is not None:
            print(f"error: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
            return 2
        if error.errno not in _NO_WRITE and not isinstance(error, BrokenPipeError):
            raise
        if not isinstance(error, BrokenPipeError):  # whoever reads a pipe may stop when it likes
            print(f"error: writing failed: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if argv[0] == "--version" or (argv[0] == "train" and "--version" in argv):
        print(__version__)
        return 0
    console.set_up() if speaks() else console.set_up_worker()
    return _dispatch(argv[0], argv[1:])


def _dispatch(command: str, arguments: Sequence[str]) -> int:
    if command not in COMMANDS:
        raise ConfigError(f"{command} is not a command: {did_you_mean(command, COMMANDS)}")
    packages, rest = _packages(arguments) if command in _BUILDERS else ([], arguments)
    try:
        with allowing(packages):
            return importlib.import_module(f"stability_lab.commands.{command}").main(rest)
    except ModuleNotFoundError as error:
        if error.name != "fcntl":  # with which folders of runs are locked
            raise
        raise ConfigError(f"{command} works on Linux and macOS, and on Windows inside WSL: here is no fcntl") from error


def _packages(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What `--allow` names, wherever it stands and however often, and all other arguments.

    The commands' own parsers know the flag for their --help alone.
    """
    parser = Parser(prog="stability_lab", add_help=False, allow_abbrev=False)
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE")
    known, rest = parser.parse_known_args(list(arguments))
    return known.allow, rest
