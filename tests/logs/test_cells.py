"""Numbers, steps and truth values in the spellings that programs write."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stability_lab.logs.cells import flag, number, step_number


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1e-3", 1e-3), (" 2 ", 2.0), (7, 7.0), ("-inf", -math.inf), ("Infinity", math.inf)]
    + [
        (cell, None)
        for cell in ("", "  ", None, "null", "None", "1.2.3", "1_000", "2,5", "1,000", True, False, [1.0], {})
    ],
)
def test_cells(cell: Any, value: float | None) -> None:
    assert number(cell) == value


def test_a_number_beyond_the_largest_float_is_infinite() -> None:
    assert number(10**400) == math.inf
    assert number(-(10**400)) == -math.inf


@pytest.mark.parametrize(
    "cell", ["NaN", "nan", float("nan"), "-nan", "-nan(ind)", "nan(0x8)", "-1.#IND", "1.#QNAN", "1.#IND00"]
)
def test_nan_is_a_value(cell: Any) -> None:
    value = number(cell)
    assert value is not None
    assert math.isnan(value)


@pytest.mark.parametrize(("cell", "value"), [("1.#INF", math.inf), ("-1.#INF00", -math.inf), (" 1.#inf ", math.inf)])
def test_infinities_of_windows(cell: str, value: float) -> None:
    assert number(cell) == value


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,000", 1000.0), ("1,234,567", 1234567.0), ("12", 12.0), (7, 7.0), ("1,00", None), ("0,5000", None)],
)
def test_steps_may_have_thousands(cell: Any, value: float | None) -> None:
    assert step_number(cell) == value


@pytest.mark.parametrize(
    ("cell", "value"),
    [(True, 1.0), (False, 0.0), ("True", 1.0), ("false", 0.0), (1.0, 1.0), ("0", 0.0), ("x", None), (None, None)],
)
def test_truth_values(cell: Any, value: float | None) -> None:
    assert flag(cell) == value
