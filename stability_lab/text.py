"""Words for people and from files: what may reach a terminal, tables, durations, numbers as programs write them."""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
import shlex
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

MISSING = "-"  # the cell of what is not known
_WIDEST_RULE, _WIDEST_NOTE = 200, 120
# A terminal counts as no narrower than this, and a column gets no narrower than that.
_NARROWEST, _NARROWEST_COLUMN = 40, 8
_COMFORT = 48  # a column of words is read well at this width
_GAP = "  "
_WORD = re.compile(r"\[[^\[\]]{1,40}\]|\S+")  # an interval is one word
_PART = re.compile(r"(?<=[_/])(?=[^\W_])|(?<=[^\W_]-)(?=[^\W\d_])")  # where a long word is broken
_LONGEST_PART = 16  # a longer part of a word may be broken anywhere
# Spellings of C's runtime library on Windows; its indefinite value is a NaN.
_INFINITE = re.compile(r"([+-]?)1\.#INF0*", re.IGNORECASE)
_NAN = re.compile(r"[+-]?(1\.#(IND|QNAN|SNAN)0*|nan\([a-z0-9_]*\))", re.IGNORECASE)


def shown(text: object) -> str:
    """`text` in one line of a terminal: control characters and others without a picture become escapes.

    What stands in somebody's files must not steer a terminal.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def printable(text: str) -> str:
    """As `shown`, for several lines: line breaks and tabs stay."""
    return "".join(c if c in "\n\t" else shown(c) for c in text)


def did_you_mean(word: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """' Did you mean ...?' with the closest of `known`, or what there is to choose from.

    `elsewhere`: dotted keys of other places, of which the last part may be what was meant.
    """
    known = sorted(known)
    places = {name.casefold(): [name] for name in known}
    for key in sorted(elsewhere):
        places.setdefault(key.rpartition(".")[2].casefold(), []).append(key)
    word = word.casefold()
    meant = places.get(word) or [key for last, keys in places.items() if f"_{word}_" in f"_{last}_" for key in keys]
    for last in get_close_matches(word, places, n=1, cutoff=0.6) if not meant else ():
        meant = places[last]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"known are {', '.join(known)}" if known else "there is none to set"


def many(n: int, noun: str) -> str:
    """`1 row` or `2,000 rows`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """`5.3 s`, `45 s`, `12 min 03 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


def rough(value: float) -> str:
    """Three digits. A perplexity takes at most eight characters: `5.87`, `258`, `5.03e4`, `5.53e239`, `inf`."""
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def written(value: Any) -> str:
    """A value as one writes it on the command line: `null`, `true`, `0.003`, `1e-5`."""
    if isinstance(value, float):
        return str(value).replace("e-0", "e-").replace("e+", "e")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def number(value: Any) -> float | None:
    """A number as a file has it, also in words; None for an empty cell, any other word or a truth value.

    NaN and infinities are numbers, in Python's spellings and in those of C on Windows.
    """
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return _of_windows(value.strip()) if isinstance(value, str) else None
    # Python reads 1_000, which no program writes as a number.
    return None if isinstance(value, str) and "_" in value else found


def _of_windows(text: str) -> float | None:
    if match := _INFINITE.fullmatch(text):
        return -math.inf if match[1] == "-" else math.inf
    return math.nan if _NAN.fullmatch(text) else None


def flatten(nested: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Nested groups as one, with keys such as `outer.inner`. An empty group is a value, or its name would be lost."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{inner}": item for inner, item in flatten(value, separator).items()}
        else:
            flat[str(key)] = value
    return flat


@dataclass(frozen=True)
class Table:
    """Cells as people read them; `notes` explain marks and abbreviations.

    `least` names the columns that a narrow terminal does without, that of least worth first. A row may end before the
    last column, with a cell of any length.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    least: tuple[str, ...] = ()


def room(wide: bool = False) -> int | None:
    """Columns that a table may take on standard output; None for any number.

    A terminal has as many as it is wide. A file or a pipe gets all, unless COLUMNS is in the environment.
    """
    if wide or sys.stdout is None or not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()):
        return None
    return max(shutil.get_terminal_size().columns, _NARROWEST)


def text_table(table: Table, width: int | None = None) -> str:
    """A table for a terminal of `width` columns: title, header, a rule, rows and notes.

    Where it is too wide, headers are wrapped, then columns of least worth are left out, then cells are wrapped.
    """
    kept = _kept(table, width)
    rows = [[row[i] for i in kept if i < len(row)] for row in (table.header, *table.rows)]
    header, *blocks = _laid_out(rows, width, headers=1)
    widest = max(_width(line) for block in (header, *blocks) for line in block)
    left_out = [name for i, name in enumerate(table.header) if i not in kept]
    notes = [
        *table.notes,
        *([f"left out for want of room: {', '.join(left_out)}; --wide shows all"] if left_out else []),
    ]
    return "\n".join(
        [
            *([table.title if width is None else filled(table.title, width)] if table.title else []),
            *header,
            "-" * min(widest, _WIDEST_RULE if width is None else width),
            *(line for block in blocks for line in block),
            *(filled(note, width) for note in notes),
        ]
    )


def aligned(rows: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
    """One line a row, with cells of one column below each other; the last cell of a row may be of any length.

    A cell that is too long for `width` columns goes on below itself.
    """
    return [line for block in _laid_out(list(rows), width) for line in block]


def filled(text: str, width: int | None = None, indent: str = "") -> str:
    """A paragraph in lines of at most 120 columns, or of `width`; all lines but the first begin with `indent`."""
    room = _WIDEST_NOTE if width is None else min(width, _WIDEST_NOTE)
    return textwrap.fill(shown(text), room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def next_command(*words: str) -> str:
    """The last line of a command: what may be run next, as a shell reads it."""
    return f"next: {shown(shlex.join(['python', '-m', 'stability_lab', *words]))}"


def _kept(table: Table, width: int | None) -> list[int]:
    """The columns that are shown. One of words, which can be wrapped, asks for no more than `_COMFORT`."""
    kept = list(range(len(table.header)))
    if width is not None:
        sizes = [min(size, _COMFORT) for size in _sizes(table.rows, len(kept))]
        sizes = list(map(max, sizes, map(_longest_word, table.header)))
        for name in table.least:
            if name in table.header and _total([sizes[i] for i in kept]) > width:
                kept.remove(table.header.index(name))
    return kept


def _laid_out(rows: Sequence[Sequence[str]], width: int | None, headers: int = 0) -> list[list[str]]:
    """The lines of each row; the first `headers` rows give way first."""
    cells = [[shown(cell) for cell in row] for row in rows]
    n = max(map(len, cells), default=0)
    sizes = _sizes(cells, n)
    if width is not None and _total(sizes) > width:
        words = [[" " * _longest_word(cell) for cell in row] for row in cells[:headers]]
        sizes = _sizes([*words, *cells[headers:]], n)
        floors = [
            max(_NARROWEST_COLUMN, size) for size in _sizes([[_longest_part(c) for c in row] for row in cells], n)
        ]
        # A column that gives way breaks no word as long as another can.
        for least in (floors, [_NARROWEST_COLUMN] * n):
            while _total(sizes) > width and any(map(operator.gt, sizes, least)):
                sizes[max(range(n), key=lambda i: (sizes[i] > least[i], sizes[i]))] -= 1
    return [_lines_of(row, sizes, width) for row in cells]


def _sizes(rows: Sequence[Sequence[str]], n: int) -> list[int]:
    """The width of each of `n` columns. The last cell of a row that ends early has what is to its right, too."""
    inner = [row if len(row) == n else row[:-1] for row in rows]
    return [max((_width(row[i]) for row in inner if i < len(row)), default=0) for i in range(n)]


def _total(sizes: Sequence[int]) -> int:
    return sum(sizes) + len(_GAP) * (len(sizes) - 1)


def _lines_of(row: Sequence[str], sizes: Sequence[int], width: int | None) -> list[str]:
    *inner, last = row
    rest = None if width is None else max(width - _total([*sizes[: len(inner)], 0]), _NARROWEST_COLUMN)
    columns = [_wrapped(cell, size) for cell, size in zip(inner, sizes, strict=False)] + [_wrapped(last, rest)]
    return [
        _GAP.join(cell + " " * (size - _width(cell)) for cell, size in zip(line, sizes, strict=False)).rstrip()
        for line in itertools.zip_longest(*columns, fillvalue="")
    ]


def _wrapped(cell: str, width: int | None) -> list[str]:
    """A cell in lines of at most `width` columns. An interval stays in one; a longer word is broken, at a sign if it
    has one."""
    if width is None or _width(cell) <= width:
        return [cell]
    lines = [""]
    for word in _WORD.findall(cell):
        if _width(lines[-1]) + 1 + _width(word) <= width and lines[-1]:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for part in _PART.split(word):
            if lines[-1] and _width(lines[-1] + part) > width:
                lines.append("")
            for c in part:
                if _width(lines[-1] + c) > width:
                    lines.append("")
                lines[-1] += c
    return lines[1:]


def _longest_word(cell: str) -> int:
    return max(map(_width, cell.split()), default=0)


def _longest_part(cell: str) -> str:
    """As many blanks as the longest part of a word in it takes that should not be broken."""
    parts = (_width(part) for word in cell.split() for part in _PART.split(word))
    return " " * max((size for size in parts if size <= _LONGEST_PART), default=0)


def _width(text: str) -> int:
    """Places that it takes on a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
