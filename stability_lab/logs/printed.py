"""Logs that trainers print for people to read: one recogniser a format, each a pattern of its lines."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?))"
_NAMED_VALUE = re.compile(r"\s{2,}[A-Za-z][^=\n]*=\S+\s*|\s{2,}Train [^:\n]+: \S+\s*")
# The head of an epoch that Keras prints above its progress bar, and a state of that bar.
_KERAS_EPOCH, _KERAS_BAR = re.compile(r"Epoch \d+/\d+\s*"), re.compile(r"\s*\d+/\d+ .*")
_WORD = re.compile(r"[A-Za-z]{2}")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Lines in which a format is looked for: some logs begin with the program that wrote them.
_SAMPLE = 20_000
_LONGEST = 4_000  # characters of a line that are looked at


# The words of a loss, a gradient norm and so on in lines of any program, with `_` for blanks.
_WORDS = {
    "loss": ("loss", "train_loss", "training_loss", "lm_loss"),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "norm", "grad"),
    "lr": ("lr", "learning_rate"),
    "val_loss": ("val_loss", "valid_loss", "validation_loss", "eval_loss"),
}


@dataclass(frozen=True)
class Printed:
    """A format: `read` makes a row of a line that `pattern` finds, or None; `note` is what to know of its numbers."""

    name: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], Row | None]
    note: str | None = None


def _groups(match: re.Match[str]) -> Row:
    """What the pattern names; a learning rate that was rounded to 0 is unknown, and not 0."""
    found = {name: value for name, value in match.groupdict().items() if value is not None}
    if re.fullmatch(r"0\.0+", found.get("lr", "")):
        del found["lr"]
    return found


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
    # A line speaks of several iterations: a loss is that of those among them that were not skipped.
    if row.get("number of skipped iterations") not in (None, "0") and row.get("lm loss", "nan") == "nan":
        row["skipped"] = "1"
    return row


def _dictionary(match: re.Match[str]) -> Row | None:
    try:
        row = ast.literal_eval(re.sub(r"(?i)\b(nan|inf(?:inity)?)\b", r"'\1'", match[0]))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return {str(key): value for key, value in row.items()} if isinstance(row, dict) else None


def _progress(match: re.Match[str]) -> Row:
    pairs = re.findall(rf"([\w./-]+)=({_NUMBER})(?=[,\]\s]|$)", match["rest"])
    epoch, at, total = (int(match[name]) for name in ("epoch", "at", "total"))
    return {"step": epoch * total + at, "epoch": epoch, **dict(pairs)}


def _named_values(match: re.Match[str]) -> Row | None:
    """The pairs `name=value` of the lines that follow a step."""
    pairs = (pair.partition("=") for pair in match["rest"].split("\n"))
    return {"step": match["step"]} | {name.strip(): value.replace(",", "") for name, equals, value in pairs if equals}


def _composer(match: re.Match[str]) -> Row:
    """The pairs `Train name: value` of the lines that follow a batch."""
    return _groups(match) | dict(re.findall(r"Train ([^:\n]+): (\S+)", match["rest"]))


def _in_epochs(match: re.Match[str]) -> Row:
    """The pairs `name: value` of a line that counts epochs from 1, and in each of them up to a total."""
    epoch, at, total = (int(match[name] or 1) for name in ("epoch", "at", "total"))
    pairs = re.findall(rf"([A-Za-z][\w./-]*): ({_NUMBER})(?=[,\s]|$)", match["rest"])
    return {"step": (epoch - 1) * total + at, **dict(pairs)}


def _keras(match: re.Match[str]) -> Row:
    return {"epoch": match["epoch"], **dict(re.findall(rf" - (\w+): ({_NUMBER})", match["rest"]))}


def _fairseq(match: re.Match[str]) -> Row | None:
    """A row of JSON, or of pairs `name=value`; its losses are in bits."""
    if match["json"] is None:
        row: Row = dict(re.findall(rf"(\w+)=({_NUMBER})", match["pairs"]))
    else:
        try:
            row = json.loads(match["json"])
        except ValueError:
            return None
    if "num_updates" not in row or "loss" not in row:
        return None
    kept = {name: value for name, value in row.items() if name in ("epoch", "lr", "gnorm", "loss_scale")}
    return {"step": row["num_updates"], "loss": float(row["loss"]) * math.log(2), **kept}


def _any_line(match: re.Match[str]) -> Row | None:
    """Step, epoch, loss, gradient norm and learning rate of a line in which each has its usual name."""
    pairs = re.findall(rf"([A-Za-z][\w/ -]*?)[ \t]*[:= ][ \t]*({_NUMBER})(?![\w.%])", match["rest"])
    said = {re.sub(r"[ -]+", "_", name.strip().lower()): value for name, value in pairs}
    found = {role: said[word] for role, words in _WORDS.items() for word in reversed(words) if word in said}
    return _groups(match) | found if {"loss", "val_loss"} & found.keys() else None


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
            rf"^s:(?P<step>\d+) (?:(?:trl|train_loss):(?P<loss>{_NUMBER})|tel:(?P<val_loss>{_NUMBER}))"
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
        "log of build-nanogpt",
        re.compile(rf"^(?P<step>\d+) (?:train (?P<loss>{_NUMBER})|val (?P<val_loss>{_NUMBER}))$"),
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
    Printed(
        "printed log of OLMo",
        re.compile(r"\[step=(?P<step>\d+)(?:/\d+)?(?:, ?\w+=[^\]]*)?\]\n(?P<rest>(?:.|\n)*)"),
        _named_values,
    ),
    Printed(
        "printed log of fairseq",
        re.compile(r"\| train_inner \| (?:(?P<json>\{.*\})|epoch \d+: +\d+ / \d+ (?P<pairs>.*))"),
        _fairseq,
        "fairseq prints its losses in bits: they were made nats.",
    ),
    Printed("printed log of transformers", re.compile(r"\{[^{}]*'loss'[^{}]*\}"), _dictionary),
    Printed(
        "progress bar of Lightning",
        re.compile(r"^Epoch (?P<epoch>\d+): .*?\| *(?P<at>\d+)/(?P<total>\d+) \[(?P<rest>.*)\]"),
        _progress,
    ),
    Printed(
        "printed log of Composer",
        re.compile(r"^(?:\[epoch=(?P<epoch>\d+)\])?\[batch=(?P<step>\d+)/\d+\]:\n(?P<rest>(?:.|\n)*)"),
        _composer,
    ),
    Printed(
        "printed log of LitGPT",
        re.compile(
            rf"\| iter (?P<iter>\d+) step \d+ \| loss train: (?P<loss>{_NUMBER})(?:, val: (?P<val_loss>{_NUMBER}))?"
        ),
        _groups,
    ),
    Printed(
        "printed log of OpenMMLab",
        re.compile(
            r"\b(?:Epoch(?:\(train\))? *\[(?P<epoch>\d+)\]|Iter\(train\) *)\[ *(?P<at>\d+)/ *(?P<total>\d+)\]"
            r"(?P<rest>.*)"
        ),
        _in_epochs,
    ),
    Printed(
        "printed log of PyTorch's examples",
        re.compile(r"^Train Epoch: (?P<epoch>\d+) \[(?P<at>\d+)/(?P<total>\d+) \(\d+%\)\](?P<rest>.*)"),
        _in_epochs,
        "It counts samples: a step is a sample here.",
    ),
    Printed(
        "printed log of Keras",
        re.compile(r"^Epoch (?P<epoch>\d+)/\d+\s*\n\s*(?P<all>\d+)/(?P=all) (?P<rest>.* - loss: .*)"),
        _keras,
        "Keras prints the mean of an epoch.",
    ),
)


# For the log of a program that is none of these.
_ANY = Printed(
    "printed lines of steps and losses",
    re.compile(
        r"(?i)^(?=(?P<rest>.*loss.*)).*?(?:\bepoch\b[\s:=#\[(]*(?P<epoch>\d+)\b.{0,60}?)?"
        r"\b(?:global[_ ]?step|steps?|iter|iteration)\b[\s:=#\[(]*"
        r"(?P<step>\d+)\b"
    ),
    _any_line,
)

PRINTED = frozenset(kind.name for kind in (*FORMATS, _ANY))


def recognised(path: Path, encoding: str) -> Printed | None:
    """The format of a printed log, if one of them finds its lines in it."""
    found = dict.fromkeys((*FORMATS, _ANY), 0)
    for line in islice(_lines(path, encoding), _SAMPLE):
        if not _WORD.search(line):  # a row of a table
            continue
        for kind in found:
            match = kind.pattern.search(line)
            found[kind] += match is not None and (kind is not _ANY or _any_line(match) is not None)
    best = max(FORMATS, key=lambda kind: found[kind])
    return best if found[best] else _ANY if found[_ANY] else None


def printed_rows(path: Path, encoding: str, kind: Printed) -> Iterator[Row]:
    """A row for each line of the format; other lines (validation, samples, the program) are none."""
    for line in _lines(path, encoding):
        if (match := kind.pattern.search(line)) and (row := kind.read(match)):
            yield row


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """The begins of lines, without colours; a progress bar writes its states into one line, between carriage returns.

    Indented lines `name=value` belong to the line before them, and so does the last state of Keras' bar.
    """
    whole = ""
    with path.open(encoding=encoding, errors="replace", newline="\n") as text:
        for line in text:
            for part in line.split("\r"):
                if not part.strip():
                    continue
                bare = _COLOURS.sub("", part[:_LONGEST].rstrip("\n"))
                if whole and _NAMED_VALUE.fullmatch(bare):
                    whole += "\n" + bare
                    continue
                head = whole.partition("\n")[0]
                if _KERAS_EPOCH.fullmatch(head) and _KERAS_BAR.fullmatch(bare):
                    whole = f"{head}\n{bare}"
                    continue
                if whole:
                    yield whole
                whole = bare
    if whole:
        yield whole
