"""The command `data`, which has commands of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from stability_lab.config import ConfigError, did_you_mean

USAGE = """usage: stability_lab data prepare [data=... tokenizer=...]    tokenise text once, with several processes
       stability_lab data inspect FILE|RUN               what is in a token file, or in a run's data
"""
COMMANDS = {"prepare": "prepare", "inspect": "inspection"}


def main(argv: Sequence[str]) -> int:
    command = argv[0] if argv else ""
    if command in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0
    if command not in COMMANDS:
        raise ConfigError(f"data {command} is not a command: {did_you_mean(command, COMMANDS)}")
    return importlib.import_module(f"stability_lab.{COMMANDS[command]}").main(argv[1:])
