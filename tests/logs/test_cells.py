"""Steps and truth values in the spellings that programs write."""

from __future__ import annotations

from typing import Any

import pytest

from stability_lab.logs.cells import flag, step_number


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
