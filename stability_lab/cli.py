"""Command line: takes the sub-command off and imports what it needs, so that --help answers at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from stability_lab import __version__
from stability_lab.config import ConfigError, Parser, did_you_mean

USAGE = f"""stability-lab {__version__}: which stabilizer does my model need, what does it cost, how sure can I be?

  python -m stability_lab train [+stabilizer=NAME] [key=value ...]   train one run; -m sweeps over a,b,c values
  python -m stability_lab plan [the same as train]                   what that would cost: size, memory, time; -m too
  python -m stability_lab evaluate RUN [--batch-size N]              validation loss of a finished run's weights
  python -m stability_lab score FILE... [--metric COLUMN]            spikes, events and verdict of anybody's log
  python -m stability_lab data prepare [data=... tokenizer=...]      tokenise text once, with several processes
  python -m stability_lab data inspect FILE|RUN                      what is in a token file, or in a run's data
  python -m stability_lab stabilizers                                what there is to choose from

Each command explains itself with --help. Exit codes: 0 ok, 1 failed, 2 bad input, 3 diverged, 130 Ctrl-C, 143 SIGTERM.
"""
COMMANDS = ("train", "plan", "evaluate", "score", "data", "stabilizers")


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
    _console()
    try:
        return _dispatch(argv[0], argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


def _dispatch(command: str, arguments: Sequence[str]) -> int:
    if command == "train":
        from stability_lab.launch import train

        return train(arguments)
    if command == "plan":
        from stability_lab.launch import refuse_distributed
        from stability_lab.plan import main as plan

        refuse_distributed()
        return plan(arguments)
    if command == "evaluate":
        from stability_lab.evaluate import main as evaluate

        return evaluate(arguments)
    if command == "score":
        from stability_lab.score import main as score

        return score(arguments)
    if command == "data":
        return _data(arguments)
    if command == "stabilizers":
        from stability_lab.listing import main as stabilizers

        return stabilizers(arguments)
    raise ConfigError(f"{command} is not a command: {did_you_mean(command, COMMANDS)}")


def _data(arguments: Sequence[str]) -> int:
    command = arguments[0] if arguments else ""
    if command == "prepare":
        from stability_lab.prepare import main as prepare

        return prepare(arguments[1:])
    if command == "inspect":
        from stability_lab.inspection import main as inspect

        return inspect(arguments[1:])
    if command and not command.startswith("-"):
        raise ConfigError(f"data {command} is not a command: {did_you_mean(command, ('prepare', 'inspect'))}")
    parser = Parser(
        prog="stability_lab data", description="Token files: write them (prepare) and look at them (inspect)."
    )
    parser.add_argument("command", choices=("prepare", "inspect"), help="each explains itself with --help")
    parser.parse_args(arguments)  # ends with the help, or with what is missing
    raise AssertionError(arguments)


def _console() -> None:
    """Messages for people go to standard output; details stay in a run's train.log."""
    log = logging.getLogger("stability_lab")
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: not getattr(record, "only_file", False))
    log.handlers = [handler]
    log.setLevel(logging.DEBUG)
    log.propagate = False
