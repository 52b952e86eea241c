"""Logs that trainers print for people to read: one recogniser a format, each a pattern of its lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity)"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Lines in which a format is looked for: some logs begin with the program that wrote them.
_SAMPLE = 20_000


@dataclass(frozen=True)
class Printed:
    """A format: `read` makes a row of a line that `pattern` finds, or None."""

    name: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], Row | None]


def _groups(match: re.Match[str]) -> Row:
    return {name: value for name, value in match.groupdict().items() if value is not None}


def _fields(match: re.Match[str]) -> Row:
    """The pairs `name: value` of a line of fields between bars, with the iteration as step."""
    row: Row = {"step": match["step"]}
    for field in match["rest"].split("|"):
        name, colon, value = field.partition(":")
        if colon and re.fullmatch(_NUMBER, value.strip()):
            row[name.strip()] = value.strip()
    # Megatron prints no loss for an iteration in which it is not finite.
    lost = row.get("number of nan iterations", "0") not in ("0", "0.0") or row.get("grad norm") == "nan"
    if lost and not any("loss" in name and name != "loss scale" for name in row):
        row["lm loss"] = "nan"
    if row.get("number of skipped iterations") not in (None, "0"):
        row["skipped"] = "1"
    return row


def _dictionary(match: re.Match[str]) -> Row | None:
    try:
        row = ast.literal_eval(re.sub(r"\b(nan|inf)\b", r"'\1'", match[0]))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return {str(key): value for key, value in row.items()} if isinstance(row, dict) else None


def _progress(match: re.Match[str]) -> Row:
    pairs = re.findall(rf"([\w./-]+)=({_NUMBER})(?=[,\]\s]|$)", match["rest"])
    epoch, at, total = (int(match[name]) for name in ("epoch", "at", "total"))
    return {"step": epoch * total + at, "epoch": epoch, **dict(pairs)}


# In the order in which they are tried; the first with the most lines is taken.
FORMATS = (
    Printed(
        "printed log of nanoGPT",
        re.compile(rf"^iter (?P<step>\d+): loss (?P<loss>{_NUMBER})(?:, time .*)?"),
        _groups,
    ),
    Printed(
        "log of llm.c",
        re.compile(
            rf"^s:(?P<step>\d+) (?:trl|train_loss):(?P<loss>{_NUMBER})"
            rf"(?: lr:(?P<lr>{_NUMBER}))?(?: norm:(?P<grad_norm>{_NUMBER}))?"
        ),
        _groups,
    ),
    Printed(
        "printed log of llm.c",
        re.compile(
            rf"^step +(?P<step>\d+)/\d+ \| (?:train )?loss +(?P<loss>{_NUMBER})[^|]*"
            rf"(?:\| norm +(?P<grad_norm>{_NUMBER})[^|]*)?(?:\| lr +(?P<lr>{_NUMBER}))?"
        ),
        _groups,
    ),
    Printed(
        "log of modded-nanogpt",
        re.compile(
            rf"^step:(?P<step>\d+)/\d+ (?:(?:train_)?loss:(?P<loss>{_NUMBER})|val_loss:(?P<val_loss>{_NUMBER}))"
        ),
        _groups,
    ),
    Printed(
        "printed log of Megatron",
        re.compile(r"(?:^|\s)iteration:? +(?P<step>\d+) ?/ *\d+ \|(?P<rest>.*)"),
        _fields,
    ),
    Printed(
        "printed log of torchtitan",
        re.compile(rf"step: *(?P<step>\d+) +loss: *(?P<loss>{_NUMBER})(?: +grad_norm: *(?P<grad_norm>{_NUMBER}))?"),
        _groups,
    ),
    Printed("printed log of transformers", re.compile(r"\{[^{}]*'loss'[^{}]*\}"), _dictionary),
    Printed(
        "progress bar of Lightning",
        re.compile(r"^Epoch (?P<epoch>\d+): .*?\| *(?P<at>\d+)/(?P<total>\d+) \[(?P<rest>.*)\]"),
        _progress,
    ),
)


def recognised(path: Path, encoding: str) -> Printed | None:
    """The format of a printed log, if one of them finds its lines in it."""
    found = dict.fromkeys(FORMATS, 0)
    for line in islice(_lines(path, encoding), _SAMPLE):
        for kind in FORMATS:
            found[kind] += kind.pattern.search(line) is not None
    best = max(FORMATS, key=lambda kind: found[kind])
    return best if found[best] else None


def printed_rows(path: Path, encoding: str, kind: Printed) -> Iterator[Row]:
    """A row for each line of the format; other lines (validation, samples, the program) are none."""
    for line in _lines(path, encoding):
        if (match := kind.pattern.search(line)) and (row := kind.read(match)):
            yield row


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Lines without colours; a progress bar writes its states into one line, between carriage returns."""
    with path.open(encoding=encoding, errors="replace", newline="\n") as text:
        for line in text:
            for part in line.split("\r"):
                if part.strip():
                    yield _COLOURS.sub("", part.rstrip("\n"))
