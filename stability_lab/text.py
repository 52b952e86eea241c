"""Words for people and from files: what may reach a terminal, tables, durations, numbers as programs write them."""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

MISSING = "-"  # the cell of what is not known
_WIDEST_RULE, _WIDEST_NOTE = 200, 120
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


def duration(seconds: float) -> str:
    """`5.3 s`, `45 s`, `12 min 03 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


def rough(value: float) -> str:
    """Three digits, in at most nine characters: `258`, `5.87`, `1e-5` or `5.53e239`."""
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
    """Cells as people read them; `notes` explain marks and abbreviations."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def text_table(table: Table) -> str:
    """A table for a terminal: title, header, a rule, rows and notes."""
    header, *rows = aligned([table.header, *table.rows])
    rule = "-" * min(max(map(_width, (header, *rows))), _WIDEST_RULE)
    notes = (textwrap.fill(shown(note), _WIDEST_NOTE, break_long_words=False) for note in table.notes)
    return "\n".join([table.title, header, rule, *rows, *notes])


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """One line a row, with cells of one column below each other; the last cell of a row may be of any length."""
    cells = [[shown(cell) for cell in row] for row in rows]
    columns = max(map(len, cells), default=0)
    widths = [max((_width(row[i]) for row in cells if i < len(row) - 1), default=0) for i in range(columns)]
    return [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in cells
    ]


def _width(text: str) -> int:
    """Places that it takes on a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
