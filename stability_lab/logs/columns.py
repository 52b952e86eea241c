"""Which column of a log is the loss, the gradient norm, the step and so on: by common names, or as it was asked for."""

from __future__ import annotations

import re

import numpy as np

from stability_lab.config import ConfigError
from stability_lab.judge.column_names import NAMES, spelling
from stability_lab.logs.sources import TENSORBOARD_CHART, Source
from stability_lab.text import did_you_mean, shown

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
VALIDATION_LOSS = re.compile(r"(?:.*/)?(?:val|valid|validation|eval|test|dev)[_/]loss")
_LISTED = 30


def _keys(column: str) -> set[str]:
    """A chart exported from W&B calls its column `RUN - METRIC`."""
    return {spelling(column), spelling(column.rsplit(" - ", 1)[-1])}


def named_for(source: Source, role: str) -> list[str]:
    """Columns with a known name of `role`, whatever is in them, the preferred ones first."""
    keys = {column: _keys(column) for column in source.columns}
    # TensorBoard writes the slashes of a tag as underscores.
    spell = (
        (lambda name: {name, name.replace("/", "_")}) if source.format == TENSORBOARD_CHART else (lambda name: {name})
    )
    found = (column for name in NAMES[role] for column in source.columns if keys[column] & spell(name))
    return list(dict.fromkeys(found))


def candidates(source: Source, role: str) -> list[str]:
    """Those that hold numbers; one with fewer than half of the values of another comes after all that have more."""
    counts = {column: count(source, column, role) for column in named_for(source, role)}
    most = max(counts.values(), default=0)
    return sorted((column for column, n in counts.items() if n), key=lambda column: 2 * counts[column] < most)


def count(source: Source, column: str, role: str) -> int:
    return int(np.count_nonzero(source.numbers(column, role).known))


def found(source: Source, role: str, notes: list[str]) -> str | None:
    """The column to take for `role`; what there is to say goes to `notes`."""
    columns = candidates(source, role)
    if not columns:
        empty = [reason for column in named_for(source, role) if (reason := no_number(source, column))]
        notes += [f"There is no {WORDS[role]}: {reason}." for reason in empty[:1]]
        return None
    if len(columns) > 1:
        others = ", ".join(shown(column) for column in columns[1:6])
        option = f"--{role.replace('_', '-')}"
        notes.append(f"The {WORDS[role]} is {shown(columns[0])}; {option} takes another, such as {others}.")
    return columns[0]


def asked_for(source: Source, role: str, asked: str) -> str:
    """The column that the user named for `role`; ConfigError where there is none with numbers."""
    column = column_named(source, role, asked)
    if not count(source, column, role):
        option = f"--{role.replace('_', '-')}={shown(asked)}"
        raise ConfigError(f"{option}: in {source.name} {no_number(source, column) or 'the column is empty'}")
    return column


def column_named(source: Source, role: str, asked: str) -> str:
    """The column that the user named for `role`, whatever is in it; ConfigError where there is none."""
    columns = source.columns
    column = asked if asked in columns else next((c for c in columns if spelling(asked) in _keys(c)), None)
    if column is None:
        guess = did_you_mean(asked, columns)
        hint = shown(guess) if guess.startswith("did you mean") else what_is_there(source)
        option = f"--{role.replace('_', '-')}={shown(asked)}"
        raise ConfigError(f"{option}: {source.name} has no such column; {hint}")
    return column


def no_number(source: Source, column: str) -> str | None:
    """Why a column is no series, if there is anything in it."""
    words = source.cells(column).dropna()
    return None if words.empty else f"the column {shown(column)} holds no number but {_sample(words.iloc[0])}"


def words_in(source: Source, column: str) -> str | None:
    """What to say of the cells that are neither a number nor empty."""
    words = source.cells(column).mask(source.numbers(column).known).dropna()
    if words.empty:
        return None
    first = _sample(words.iloc[0])
    if len(words) == 1:
        return f"1 cell of {shown(column)} is no number and left out: {first}."
    return f"{len(words):,} cells of {shown(column)} are no numbers and left out, the first is {first}."


def what_is_there(source: Source) -> str:
    names = source.columns
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"its columns are {', '.join(map(shown, names[:_LISTED]))}{more}"


def nothing_known(source: Source) -> ConfigError:
    """The error for a log in which neither a loss nor a gradient norm was found."""
    option = "--loss COLUMN, --grad-norm COLUMN or --metric COLUMN"
    for column in (*named_for(source, "loss"), *named_for(source, "grad_norm")):
        if reason := no_number(source, column):
            return ConfigError(f"{source.name} cannot be judged: {reason} ({option} names another column)")
    for column in named_for(source, "skipped"):
        if (source.numbers(column, "skipped").value > 0).all():
            return ConfigError(f"{source.name} has no loss: all {len(source.table):,} steps in it were skipped")
    for column in source.columns:
        if VALIDATION_LOSS.fullmatch(spelling(column)) and count(source, column, "loss"):
            return ConfigError(
                f"{source.name} has no training loss, only {shown(column)}: --loss {shown(column)} judges that"
            )
    return ConfigError(
        f"{source.name} has no known name of a loss or a gradient norm: {option}; {what_is_there(source)}"
    )


def _sample(cell: object) -> str:
    text = shown(cell)
    return repr(text if len(text) <= 30 else f"{text[:30]}...")
