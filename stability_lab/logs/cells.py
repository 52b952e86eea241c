"""What a cell of a log says beyond a plain number: a step with thousands, a truth value, a decimal comma."""

from __future__ import annotations

import re
from typing import Any

from stability_lab.text import number

NOTHING = ("", "-", "null", "Null", "NULL", "none", "None", "NONE", "na", "NA", "n/a", "N/A")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
_OF = re.compile(r"(\d+) ?/ ?\d+")
DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)")


def step_number(cell: Any) -> float | None:
    """As `number`; thousands may be separated by commas, since a step has no decimals, and `5/1000` is step 5."""
    if isinstance(cell, str):
        if _THOUSANDS.fullmatch(cell.strip()):
            return float(cell.replace(",", ""))
        if of := _OF.fullmatch(cell.strip()):
            return float(of[1])
    return number(cell)


def flag(cell: Any) -> float | None:
    """As `number`; truth values are 1 and 0, also as words."""
    word = str(cell).strip().lower()
    return {"true": 1.0, "false": 0.0}.get(word, number(cell))


def has_decimal_comma(cell: str) -> bool:
    """`2,5` and `0,123` have one, `1,234` may be a thousand."""
    return DECIMAL_COMMA.fullmatch(cell) is not None and _THOUSANDS.fullmatch(cell) is None
