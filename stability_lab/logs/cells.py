"""What a cell of a log says: a number in any of the spellings that programs write, a step, a truth value or nothing."""

from __future__ import annotations

import math
import re
from typing import Any

# Spellings of C's runtime library on Windows; its indefinite value is a NaN.
_INFINITE = re.compile(r"([+-]?)1\.#INF0*", re.IGNORECASE)
_NAN = re.compile(r"[+-]?(1\.#(IND|QNAN|SNAN)0*|nan\([a-z0-9_]*\))", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_NOTHING = frozenset({"", "null", "none", "na", "n/a", "-"})


def number(cell: Any) -> float | None:
    """A cell's value; None for an empty cell, a word or a truth value. NaN and infinities are values, also as words."""
    if isinstance(cell, bool):
        return None
    try:
        value = float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf
    except (TypeError, ValueError):
        return _of_windows(cell.strip()) if isinstance(cell, str) else None
    # Python reads 1_000, which no program writes as a number.
    return None if isinstance(cell, str) and "_" in cell else value


def _of_windows(text: str) -> float | None:
    if match := _INFINITE.fullmatch(text):
        return -math.inf if match[1] == "-" else math.inf
    return math.nan if _NAN.fullmatch(text) else None


def step_number(cell: Any) -> float | None:
    """As `number`; thousands may be separated by commas, since a step has no decimals."""
    if isinstance(cell, str) and _THOUSANDS.fullmatch(cell.strip()):
        return float(cell.replace(",", ""))
    return number(cell)


def flag(cell: Any) -> float | None:
    """As `number`; truth values are 1 and 0, also as words."""
    word = str(cell).strip().lower()
    return {"true": 1.0, "false": 0.0}.get(word, number(cell))


def is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and cell.strip().lower() in _NOTHING)


def has_decimal_comma(cell: Any) -> bool:
    return isinstance(cell, str) and _DECIMAL_COMMA.fullmatch(cell.strip()) is not None
