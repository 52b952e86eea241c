"""The command `data`, which has commands of its own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from stability_lab.config import ConfigError, Parser
from stability_lab.text import did_you_mean

COMMANDS = ("prepare", "inspect")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="stability_lab data",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="prepare [data=... tokenizer=...]   tokenise text once, with several processes\n"
        "inspect FILE|RUN                   what is in a token file, or in a run's data",
    )
    parser.add_argument("command", choices=COMMANDS)
    if not argv or argv[0] not in COMMANDS:
        if argv and not argv[0].startswith("-"):
            raise ConfigError(f"data {argv[0]} is not a command: {did_you_mean(argv[0], COMMANDS)}")
        parser.parse_args(argv)
    return importlib.import_module(f"stability_lab.commands.data_{argv[0]}").main(argv[1:])
