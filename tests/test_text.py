"""Words that every command shares: numbers of files, durations, one table, nothing that steers a terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stability_lab.text import (
    Table,
    aligned,
    did_you_mean,
    duration,
    flatten,
    number,
    printable,
    rough,
    shown,
    text_table,
)


def test_did_you_mean() -> None:
    known = {"qknorm", "zloss", "none"}
    assert did_you_mean("qknrom", known) == "did you mean qknorm?"
    assert did_you_mean("something", known) == "known are none, qknorm, zloss"


def test_what_has_no_picture_becomes_an_escape() -> None:
    text = "a\x1b[31m\n\tb\u202eé\udc80"
    assert shown(text) == "a\\x1b[31m\\n\\tb\\u202eé\\udc80"
    assert printable(text) == "a\\x1b[31m\n\tb\\u202eé\\udc80"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1e-3", 1e-3), (" 2 ", 2.0), (7, 7.0), ("-inf", -math.inf), ("Infinity", math.inf)]
    + [("1.#INF", math.inf), ("-1.#INF00", -math.inf), (" 1.#inf ", math.inf)]
    + [(10**400, math.inf), (-(10**400), -math.inf)]
    + [
        (cell, None)
        for cell in ("", "  ", None, "null", "None", "1.2.3", "1_000", "2,5", "1,000", True, False, [1.0], {})
    ],
)
def test_numbers(value: Any, expected: float | None) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    "value", ["NaN", "nan", float("nan"), "-nan", "-nan(ind)", "nan(0x8)", "-1.#IND", "1.#QNAN", "1.#IND00"]
)
def test_nan_is_a_number(value: Any) -> None:
    found = number(value)
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.0 s"), (5.34, "5.3 s"), (45, "45 s"), (59.6, "1 min 00 s"), (723, "12 min 03 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "digits"),
    [
        (258.4, "258"),
        (5.866, "5.87"),
        (1e-5, "1e-5"),
        (math.exp(551.3), "2.67e239"),
        (1.2e6, "1.2e6"),
        (math.inf, "inf"),
    ],
)
def test_three_digits(value: float, digits: str) -> None:
    assert rough(value) == digits
    assert len(digits) <= 9


def test_flatten() -> None:
    nested = {"a": {"b": {"c": 1}, "d": None}, "e": [1, {"f": 2}], "g": {}, 3: {4: 5}}
    assert flatten(nested) == {"a.b.c": 1, "a.d": None, "e": [1, {"f": 2}], "g": {}, "3.4": 5}
    assert flatten({"a": {"b": 1}}, "/") == {"a/b": 1}


def test_cells_of_a_column_stand_below_each_other() -> None:
    rows = [("a", "bb", "c"), ("aaa", "a last cell of any length"), ("", "b", ""), ("日本", "x", "y")]
    assert aligned(rows) == ["a     bb  c", "aaa   a last cell of any length", "      b", "日本  x   y"]
    assert aligned([]) == []


def test_a_table_has_a_title_a_rule_and_notes() -> None:
    table = Table("Title", ("name", "n"), (("one", "1"), ("eleven\x1b", "11")), ("note",))
    assert text_table(table).split("\n") == [
        "Title",
        "name        n",
        "-" * 14,
        "one         1",
        "eleven\\x1b  11",
        "note",
    ]
