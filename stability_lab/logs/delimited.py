"""Tables of text by pandas: comma, semicolon, tab or blanks, with or without a header, decimal commas, comments."""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter, deque
from itertools import islice
from pathlib import Path
from typing import TextIO

import pandas as pd

from stability_lab.logs.cells import DECIMAL_COMMA, NOTHING, has_decimal_comma, step_number
from stability_lab.text import many, number

_SAMPLE = 1 << 16  # characters in which a decimal comma is looked for
_ROWS = 50  # rows by which a table is told from prose


def read_table(path: Path, encoding: str) -> tuple[pd.DataFrame, list[str]] | None:
    """The table by the names in its header, and what is to be said of it; None for what is no table."""
    with path.open(encoding=encoding, errors="replace", newline="") as text:
        header, notes = _header(text)
        delimiter = _delimiter(header)
        if not _is_table(header, delimiter, text):
            return None
        names, doubled = _unique([name.strip() for name in _cells(header, delimiter)])
        bare = len(names) > 1 and _is_data(header)
        if bare:
            names, told = names_of(names)
            doubled = [told]
        comma = delimiter != "," and _has_decimal_commas(text, delimiter)
        try:
            frame = _read(text, names, delimiter, "," if comma else ".", None if bare else 0)
        except (pd.errors.ParserError, pd.errors.EmptyDataError):
            return None
    notes += doubled
    if (repeated := _repeats_header(frame)).any():
        frame = frame.loc[~repeated].reset_index(drop=True)
        notes.append(f"{many(int(repeated.sum()), 'line')} with the header again: left out.")
    if comma:
        words = frame.select_dtypes(exclude="number").columns
        frame[words] = frame[words].replace(DECIMAL_COMMA, r"\1.\2", regex=True)
        notes.append("Its numbers have decimal commas.")
    if _is_cut(path, encoding, delimiter, len(names)):
        frame = frame.iloc[:-1]
        notes.append("The last line is unfinished and left out.")
    return frame, notes


def _delimiter(line: str) -> str:
    """The commonest sign between cells; blanks where there is none of the others."""
    delimiter = max(",;\t", key=line.count)
    return " " if not line.count(delimiter) and len(line.split()) > 1 else delimiter


def _is_table(header: str, delimiter: str, text: TextIO) -> bool:
    """Whether at least half of the next rows hold a number in a cell of its own, and as many words as the header.

    Looked for in what follows next, and left to be read. A row between other signs than blanks may be shorter. Words
    and numbers between blanks are a sentence and no header.
    """
    if delimiter == " " and not _is_data(header) and any(step_number(word) is not None for word in header.split()):
        return False
    begin = text.tell()
    text.readline()
    rows = [_cells(line, delimiter) for line in islice(iter(text.readline, ""), _ROWS) if line.strip()]
    text.seek(begin)
    width = len(_cells(header, delimiter))
    fits = [
        (delimiter != " " or len(row) == width) and any(step_number(cell) is not None for cell in row) for row in rows
    ]
    return not header.strip() or 2 * sum(fits) >= len(fits)


def _cells(line: str, delimiter: str) -> list[str]:
    return line.split() if delimiter == " " else next(csv.reader([line], delimiter=delimiter), [])


def names_of(cells: list[str]) -> tuple[list[str], str]:
    """Names for the columns of a table without a header, and what to say of them."""
    if len(cells) == 2 and cells[0].strip().isdigit():
        return [
            "step",
            "loss",
        ], "The table has no header: its first column is taken as the step, the second as the loss."
    names = [f"column {i}" for i in range(1, len(cells) + 1)]
    return names, f"The table has no header: its columns are called {names[0]} to {names[-1]}."


def _read(text: TextIO, names: list[str], delimiter: str, decimal: str, header: int | None) -> pd.DataFrame:
    """The table under its header. A cell beyond the names is left out, and `NaN` stays a word: it is no empty cell."""
    with warnings.catch_warnings():
        # A column of numbers and words may hold both.
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        return pd.read_csv(
            text,
            sep=r"\s+" if delimiter == " " else delimiter,
            decimal=decimal,
            header=header,  # which also tells pandas how many columns there are
            names=names,
            usecols=range(len(names)),
            index_col=False,
            keep_default_na=False,
            na_values=NOTHING,
            skipinitialspace=True,
        )


def _repeats_header(frame: pd.DataFrame) -> pd.Series:
    """Which rows hold the columns' own names, as after another run into the same file."""
    repeated = pd.Series(True, index=frame.index)
    for name, cells in frame.items():
        # Otherwise none of its cells is a word.
        repeated &= (
            cells.eq(name) if pd.api.types.is_object_dtype(cells) or pd.api.types.is_string_dtype(cells) else False
        )
    return repeated


def _header(text: TextIO) -> tuple[str, list[str]]:
    """The line with the names, to which `text` is set, and a note where comments (`#`) stand above it."""
    comments: list[tuple[int, str]] = []
    begin, line = 0, text.readline()
    while (line and not line.strip()) or line.lstrip().startswith("#"):
        comments += [(begin, line.lstrip("# ").strip())] if line.strip() else []
        begin, line = text.tell(), text.readline()
    if comments and _is_data(line) and not _is_data(comments[-1][1]):
        begin, line = comments.pop()  # the names themselves stand in a comment, as numpy.savetxt writes them
    text.seek(begin)
    if not comments:
        return line, []
    many = f"{len(comments)} lines of comments above the table are left out."
    return line, [many if len(comments) > 1 else "A comment above the table is left out."]


def _is_data(line: str) -> bool:
    cells = [cell.strip() for cell in line.split(_delimiter(line))]
    return any(cells) and all(not cell or number(cell) is not None for cell in cells)


def _unique(names: list[str]) -> tuple[list[str], list[str]]:
    """The names, numbered from the second of equal ones on: otherwise one column would hide the other."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    notes = [
        f"The header names {name} {many} times: the first is {name}, the next {name} (2)."
        for name, many in seen.items()
        if many > 1 and name
    ]
    return unique, notes


def _has_decimal_commas(text: TextIO, delimiter: str) -> bool:
    """Looked for in what follows next, and left to be read."""
    begin = text.tell()
    sample = text.read(_SAMPLE)
    text.seek(begin)
    return any(has_decimal_comma(cell.strip(' "')) for cell in re.split(rf"[{delimiter}\r\n]", sample))


def _is_cut(path: Path, encoding: str, delimiter: str, columns: int) -> bool:
    """Whether the last line lacks its end and cells that the line before has."""
    with path.open(encoding=encoding, errors="replace", newline="\n") as lines:
        last = deque(lines, maxlen=2)
    if len(last) < 2 or last[-1].endswith("\n"):
        return False
    before, cut = (len(_cells(line, delimiter)) for line in last)
    return cut < columns == before
