"""Words that every command shares: numbers of files, durations, one table, nothing that steers a terminal."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest

from stability_lab.text import (
    Table,
    aligned,
    did_you_mean,
    duration,
    flatten,
    next_command,
    number,
    printable,
    room,
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
        (math.exp(709.7), "1.65e308"),
        (50257.0, "5.03e4"),
        (999_999.0, "1e6"),
        (1.2e6, "1.2e6"),
        (math.inf, "inf"),
    ],
)
def test_three_digits(value: float, digits: str) -> None:
    assert rough(value) == digits
    assert len(digits) <= 8


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


WIDE = Table(
    "Runs of everything that was trained",
    ("arm", "difference to the arm of the baseline", "memory", "finding"),
    (
        ("none", "-", "1.00 GB", "baseline"),
        ("qknorm", "+0.0098 [+0.0087, +0.0109]", "2.00 GB", "higher than that of the baseline by a little"),
    ),
    least=("memory", "arm"),
)


def test_a_table_that_fits_is_whole() -> None:
    assert text_table(WIDE, 200) == text_table(WIDE)


def test_a_narrow_terminal_wraps_headers_then_leaves_columns_out_then_wraps_cells() -> None:
    assert text_table(WIDE, 92).split("\n") == [
        "Runs of everything that was trained",
        "arm     difference to the arm of    memory   finding",
        "        the baseline",
        "-" * 89,
        "none    -                           1.00 GB  baseline",
        "qknorm  +0.0098 [+0.0087, +0.0109]  2.00 GB  higher than that of the baseline by a little",
    ]
    assert text_table(WIDE, 82).split("\n")[-3:] == [
        "none    -                           baseline",
        "qknorm  +0.0098 [+0.0087, +0.0109]  higher than that of the baseline by a little",
        "left out for want of room: memory; --wide shows all",
    ]
    assert text_table(WIDE, 50).split("\n") == [
        "Runs of everything that was trained",
        "difference to the arm of  finding",
        "the baseline",
        "-" * 49,
        "-                         baseline",
        "+0.0098                   higher than that of the",
        "[+0.0087, +0.0109]        baseline by a little",
        "left out for want of room: arm, memory; --wide",
        "shows all",
    ]


def test_a_word_is_broken_at_a_sign_or_not_at_all_while_another_column_can_give_way() -> None:
    rows = (("grad_norm", "olmo_core", "1e-05", "2 of 300 that were looked at"),)
    table = Table("", ("signal", "definition", "threshold", "spikes"), rows)
    assert text_table(table, 42).split("\n") == [
        "signal    definition  threshold  spikes",
        "-" * 42,
        "grad_     olmo_core   1e-05      2 of 300",
        "norm                             that were",
        "                                 looked at",
    ]
    long = Table("", ("run", "what"), (("gpt-pico/lr_0003-seed_1", "a sentence of words"),))
    assert text_table(long, 22).split("\n")[2:] == [
        "gpt-pico/   a sentence",
        "lr_0003-    of words",
        "seed_1",
    ]


@pytest.mark.parametrize("width", [40, 57, 80, 120])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    cells = ("日本語の実験" * 9, "outputs/" + "x" * 70, "1.771 ± 0.012", "a sentence of some words " * 5)
    table = Table("A title of words " * 9, ("run", "path", "loss", "what"), (cells, (*cells[:2], "cut " * 40)))
    lines = text_table(table, width).split("\n")
    assert max(sum(2 if ord(c) > 0x2E80 else 1 for c in line) for line in lines) <= width
    joined = "".join("".join(lines).split())
    assert joined.count("日") >= 18
    assert joined.count("cut") == 40


def test_a_value_of_any_length_goes_on_below_itself() -> None:
    assert aligned([("verdict", "stable and without a spike"), ("a", "b")], 24) == [
        "verdict  stable and",
        "         without a spike",
        "a        b",
    ]


def test_the_room_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert room() is None  # a pipe or a file
    monkeypatch.setenv("COLUMNS", "97")
    assert room() == 97
    assert room(wide=True) is None
    monkeypatch.setenv("COLUMNS", "3")
    assert room() == 40


def test_a_command_is_printed_as_a_shell_reads_it() -> None:
    line = next_command("train", "data.path=a b/ö'x.txt")
    assert shlex.split(line)[1:] == ["python", "-m", "stability_lab", "train", "data.path=a b/ö'x.txt"]
