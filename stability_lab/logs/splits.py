"""Which rows of a log are the training of one run: rows of validation and of other runs are told apart, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from stability_lab.config import ConfigError
from stability_lab.judge.column_names import spelling
from stability_lab.logs.columns import column_named
from stability_lab.logs.sources import Source
from stability_lab.text import shown

Rows = NDArray[np.intp]

# Columns that say what a row measures, and the words for what is no training, alone or before words of `_MEASURED`.
SPLITS = ("split", "mode", "phase", "stage", "subset", "partition", "set", "type", "event", "kind")
VALIDATION = (
    *("val", "valid", "validation", "validate", "validating", "eval", "evaluation", "evaluate", "evaluating"),
    *("test", "testing", "dev", "holdout"),
)
_MEASURED = ("step", "epoch", "batch", "iter", "iteration", "loss", "metrics", "result", "results", "log", "end", "set")
# Columns of truth values, and the words of a split for true and false.
FLAGS = {
    **dict.fromkeys(("is_train", "is_training", "train", "training"), ("train", "val")),
    **{f"{prefix}{word}": (word, "train") for word in VALIDATION for prefix in ("is_", "")},
}
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Columns that name runs, the preferred first; any other column of words comes after them.
RUNS = (
    *("run", "run_name", "run_id", "experiment", "exp", "exp_name", "name", "model", "model_name", "config", "arm"),
    *("method", "variant", "optimizer", "optim", "group", "trial", "job", "id", "seed", "rank", "worker", "version"),
)


@dataclass(frozen=True)
class Options:
    """What the user says of a log: names of columns, and what tells its rows apart."""

    loss: str | None = None
    grad_norm: str | None = None
    step: str | None = None
    runs_by: str | None = None
    split: str | None = None
    restarts: Literal["runs", "continue"] | None = None


NOTHING_ASKED = Options()


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows of one run's training in a source, and how many were left out of it, by reason."""

    source: Source
    left_out: dict[str, int] = field(default_factory=dict)


def without_validation(source: Source, signals: Sequence[str], asked: str | None) -> TrainingRows:
    """The source without rows of validation, or with those of the split that was asked for; ConfigError if there are
    none."""
    measured = rows_with(source, signals)
    for column, words in _splits(source, measured):
        if asked is not None:
            kept = (words == asked.strip().lower()).to_numpy()
            if kept.any():
                return _rows(source, kept, f"of another {shown(column)} than {shown(asked)}")
            continue
        validation = words.map(_is_validation, na_action="ignore").eq(True).to_numpy() & measured
        if validation.any() and not validation[measured].all():
            return _rows(source, ~validation, f"of validation (by the column {shown(column)})")
    if asked is not None:
        raise ConfigError(
            f"--split={shown(asked)}: {source.name} has no such word in a column {', '.join(SPLITS)} or is_train"
        )
    return TrainingRows(source)


def refuse_validation_alone(source: Source, signals: Sequence[str]) -> None:
    """ConfigError where a column says of all rows with a value that they are of validation."""
    measured = rows_with(source, signals)
    for column, words in _splits(source, measured):
        own = words.loc[measured]
        if own.map(_is_validation, na_action="ignore").eq(True).all():
            word = shown(own.iloc[0])
            raise ConfigError(
                f"{source.name} has no training: by the column {shown(column)} all of its rows are of validation; "
                f"--split {word} judges them"
            )


def _splits(source: Source, measured: NDArray[np.bool_]) -> Iterator[tuple[str, pd.Series]]:
    """Columns that say what a row measures, and the word of each row; truth values are made words."""
    for column in source.columns:
        name = _name(column)
        if name in SPLITS:
            yield column, source.cells(column).map(lambda cell: str(cell).strip().lower(), na_action="ignore")
        elif name in FLAGS:
            cells = source.cells(column)
            truth = cells.map(lambda cell: _TRUTH.get(str(cell).strip().lower()), na_action="ignore")
            own = truth.loc[measured]
            # A value that is 1 in all rows and called `test` may be anything.
            if own.notna().all() and (name not in VALIDATION or own.nunique() > 1):
                yes, no = FLAGS[name]
                yield column, truth.map({True: yes, False: no})


def _is_validation(word: str) -> bool:
    first, *others = re.split(r"[\W_]+", word)
    return first in VALIDATION and all(other in _MEASURED for other in others)


def _name(column: str) -> str:
    """A column's name as it is compared, without the sections before it."""
    return spelling(column).rsplit("/", 1)[-1]


def _rows(source: Source, kept: NDArray[np.bool_], why: str) -> TrainingRows:
    return TrainingRows(_part(source, kept, source.run), {why: int(np.count_nonzero(~kept))})


def _part(source: Source, kept: NDArray[np.bool_], run: str | None) -> Source:
    return replace(source, table=source.table.loc[kept].reset_index(drop=True), run=run)


def by_runs(source: Source, signals: Sequence[str], steps: str | None, asked: str | None) -> list[Source]:
    """The runs of a table in which a column names them; or the source as it is.

    A column names runs if the steps of all rows do not rise, and those of each of its words do, or fall back half as
    often at most; without steps, if its name is that of runs. ConfigError where the column that was asked for is not
    there.
    """
    if asked is not None:
        return _named(source, [column_named(source, "runs_by", asked)], signals)
    # A gradient norm may stand in a row of its own beside the loss of its step.
    rows = np.flatnonzero(source.numbers(signals[0]).known)
    order = _steps(source, steps, rows)
    if order is not None and np.all(np.diff(order) > 0):
        return [source]
    known = _candidates(source, signals, steps, rows)
    if order is None:
        best = [column for column in known if _name(column) in RUNS]
        return _named(source, best, signals) if best else [source]
    tried = [*([column] for column in known), *(list(pair) for pair in combinations(known, 2)), known]
    faults = {tuple(columns): _faults(source, columns, rows, order) for columns in tried if columns}
    best = min(faults, key=faults.__getitem__, default=())  # the first of equals
    # Of a run that was resumed the steps fall back, too.
    enough = np.count_nonzero(np.diff(order) <= 0) / 2
    return _named(source, list(best), signals) if best and faults[best] <= enough else [source]


def _candidates(source: Source, signals: Sequence[str], steps: str | None, rows: Rows) -> list[str]:
    """Columns of words, and of numbers by their name, that hold something twice and not always."""
    rank = {name: i for i, name in enumerate(RUNS)}
    found = []
    for column in source.columns:
        name = _name(column)
        if column in (*signals, steps) or name in SPLITS:
            continue
        cells = source.cells(column).iloc[rows]
        words = not pd.api.types.is_numeric_dtype(cells) and not source.numbers(column).known[rows].any()
        if (words or name in rank) and cells.notna().mean() >= 0.5 and 1 < cells.nunique() <= rows.size / 2:
            found.append((rank.get(name, len(rank)), column))
    return [column for _, column in sorted(found)]


def _faults(source: Source, columns: list[str], rows: Rows, order: NDArray[np.float64]) -> int:
    """How often steps do not rise within the runs that the columns name."""
    groups = source.table.iloc[rows].groupby(columns, sort=False, dropna=False).indices
    return int(sum(np.count_nonzero(np.diff(order[at]) <= 0) for at in groups.values()))


def _named(source: Source, columns: list[str], signals: Sequence[str]) -> list[Source]:
    cells = (source.cells(column).astype(object) for column in columns)
    first, *others = (words.where(words.notna(), "-").map(str) for words in cells)
    names = first.str.cat(others, sep=", ") if others else first
    there = dict.fromkeys(names.to_numpy()[rows_with(source, signals)])
    return [_part(source, (names == name).to_numpy(), str(name)) for name in there]


def _steps(source: Source, column: str | None, rows: Rows) -> NDArray[np.float64] | None:
    if column is None:
        return None
    values, known = source.numbers(column, "step")
    return values[rows] if known[rows].all() else None


def rows_with(source: Source, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Which rows have a value of one of `columns`."""
    return np.any([source.numbers(column).known for column in columns], axis=0)


def by_restarts(source: Source, signals: Sequence[str], options: Options) -> list[Source]:
    """The runs that stand below each other in a log whose steps begin anew, and whose values do, too.

    ConfigError where the values do not say whether they do, and the user neither.
    """
    rows = np.flatnonzero(rows_with(source, signals))
    order = _steps(source, options.step, rows)
    if order is None or options.restarts == "continue":
        return [source]
    begins = [int(at) for at in np.flatnonzero(np.diff(order) < 0) + 1 if begins_anew(order, at)]
    if not begins or begins_in_no_order(order) or _counts_epochs(source, rows, begins):
        return [source]
    values = source.numbers(signals[0]).value[rows]
    anew = {options.restarts == "runs" or _begins_anew(values, at) for at in begins}
    if anew == {False}:
        return [source]
    if anew != {True}:
        many = f"{len(begins)} times" if len(begins) > 1 else "once"
        raise ConfigError(
            f"{source.name}: the steps fall back to {order[begins[0]]:g} {many}, and the values do not say whether it "
            "is another run: give --restarts runs, --restarts continue, or --runs-by COLUMN"
        )
    edges = [0, *(int(rows[at]) for at in begins), len(source.table)]
    index = np.arange(len(source.table))
    return [
        _part(source, (index >= low) & (index < high), f"{i} of {len(edges) - 1}")
        for i, (low, high) in enumerate(pairwise(edges), start=1)
    ]


def begins_anew(steps: NDArray[Any], at: Any) -> Any:
    """Which of the positions `at`, at which steps fall back, are at the first step of the log or the one after it."""
    return steps[at] <= steps[np.argmax(steps > steps[0])]  # the first step itself where there is no later one


def begins_in_no_order(steps: NDArray[Any]) -> bool:
    """Whether steps fall back so often that it is no resume, restart or epoch."""
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    elsewhere = np.count_nonzero(~begins_anew(steps, back)) if back.size else 0
    return int(elsewhere) > max(2, steps.size // 10) or back.size > max(2, steps.size // 3)


def epoch_column(source: Source, rows: Rows) -> str | None:
    """The column that numbers the epoch of each row, if there is one."""
    for column in source.columns:
        if _name(column) == "epoch":
            values, known = source.numbers(column)
            if known[rows].all() and np.array_equal(values[rows], np.floor(values[rows])):
                return column
    return None


def epochs(source: Source, rows: Rows) -> NDArray[np.float64] | None:
    """The epoch of each row, where a column says it."""
    column = epoch_column(source, rows)
    return None if column is None else source.numbers(column).value[rows]


def _counts_epochs(source: Source, rows: Rows, begins: Sequence[int]) -> bool:
    """Whether the epoch rises wherever the steps begin anew."""
    epoch = epochs(source, rows)
    return epoch is not None and all(epoch[at] > epoch[at - 1] for at in begins)


def _begins_anew(values: NDArray[np.float64], at: int) -> bool | None:
    """Whether the values from position `at` on are nearer to those at the begin of the log than to those before it.

    None where they are not twice as near to one of the two. All three are medians of as many values.
    """
    n = max(1, min(5, at // 4, (values.size - at) // 4))
    new, end, begin = (float(np.median(part)) for part in (values[at : at + n], values[at - n : at], values[:n]))
    if not np.isfinite(end):
        return True
    to_begin, to_end = abs(new - begin), abs(new - end)
    return None if to_begin <= 2 * to_end and to_end <= 2 * to_begin else to_begin < to_end


def first_level(values: NDArray[np.float64]) -> float:
    """The median of the first values of a stretch."""
    return float(np.median(values[: max(1, min(5, values.size // 4))]))
