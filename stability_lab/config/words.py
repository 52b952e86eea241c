"""Words of a command line that mean themselves: names and paths, which Hydra's grammar would read as something else."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from stability_lab.config.schema import ConfigError

# Keys whose value is a name or a path. For Hydra 1_1_1 is a number, and blanks, commas, brackets and signs beyond ASCII
# mean something or are no value at all.
NAMES = ("run_name", "group")
PATHS = ("resume", "output_dir", "data.path", "data.val_path", "data.data_files", "tokenizer.path")

_PLAIN = re.compile(r"[A-Za-z/_][\w./~-]*", re.ASCII)
_NOT_TEXT = ("true", "false", "nan", "inf")
_FUNCTION = re.compile(r"(choice|range|interval|glob|sort|shuffle|extend_list)\(")
_FLAGS = (
    *("--multirun", "--run", "--help", "--hydra-help", "--version", "--resolve", "--package", "--config-dir"),
    *("--config-path", "--config-name", "--experimental-rerun", "--cfg", "--info", "--shell-completion", "--allow"),
)


def literal(text: str, multirun: bool) -> str:
    """An override as the shell hands it over, with a name or a path in quotes where Hydra would not take it as text."""
    key, equals, value = text.partition("=")
    plain = key.lstrip("+")
    # A file in place of an option of `data` gets its sentence later.
    meant = plain in (*NAMES, *PATHS) or (plain == "data" and ("." in value or "/" in value))
    if not meant or not value or value == "null" or value[0] in "'\"[" or "${" in value:
        return text
    if _FUNCTION.match(value):
        return text
    # A sweep over names has commas between them, and a path may have one in it.
    parts = value.split(",") if plain != "resume" and (multirun or plain in NAMES) else [value]
    return f"{key}{equals}{','.join(map(_in_quotes, parts))}"


def _in_quotes(value: str) -> str:
    return value if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT else quoted(value)


def quoted(text: str) -> str:
    """Write any text as a Hydra value."""
    # Inside quotes a backslash is one, but before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def check_dashes(argv: Sequence[str]) -> None:
    """ConfigError for overrides that are written as flags, as a W&B agent does by default, also without `=`."""
    dashed = []
    for token, value in pairwise([*argv, "-"]):
        if token.startswith("--") and token.partition("=")[0] not in _FLAGS:
            if "=" in token:
                dashed.append(token)
            elif not value.startswith("-") and "=" not in value:
                dashed.append(f"{token} {value}")
    if dashed:
        right = " ".join(token[2:].replace(" ", "=", 1) for token in dashed)
        raise ConfigError(
            f"{' '.join(dashed)}: write {right}, without the dashes (in a W&B sweep: ${{args_no_hyphens}} as command)"
        )


def hint_of_data(value: str, hint: str) -> str:
    """`hint`, or what to write where the value is, or may be, a file."""
    there, suffix = os.path.exists(os.path.expanduser(value)), Path(value).suffix
    if not there and not suffix:
        return hint
    ids = suffix in (".bin", ".npy")
    words = f"write data={'tokens' if ids else 'text'} {shlex.quote(f'data.path={value}')}"
    return f"to train on {'these ids' if ids else 'this text'}, {words}" if there else f"{hint}; for a file, {words}"
