"""Level and power of `compare`, on fewer simulated sweeps than benchmarks/levels.py makes."""

import pytest

from benchmarks import levels


@pytest.mark.slow
def test_a_report_keeps_its_level_and_finds_an_effect() -> None:
    for name in ("equal", "an arm 5 at one rate"):
        nothing = levels.simulated(3, name, 0.5, 0.0, 400, seed=100)
        assert nothing.report <= 0.08, name  # three standard errors above 5%
    found = levels.simulated(3, "equal", 0.0, 6.0, 200, seed=100)
    assert found.effect >= 0.8
    assert found.paired_effect <= 0.4
