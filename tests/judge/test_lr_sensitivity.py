import math

import numpy as np
import pytest

from stability_lab.judge.lr_sensitivity import (
    Bracket,
    largest_stable_lr,
    lr_sensitivity,
    ratio_interval,
    refine,
    usable_range,
)

NAN, INF = float("nan"), float("inf")
LRS = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]

# Public results of arXiv:2601.02031: test losses over LRS, l0, and the sensitivity by both divisors.
PUBLISHED = [
    ("16M none", [3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065], 10.83, 0.262, 0.306),
    ("16M z-loss", [3.961, 3.878, 3.848, 3.836, 3.841, 3.854, 3.955], 10.83, 0.046, 0.054),
    ("16M mu-loss", [3.961, 3.881, 3.848, 3.838, 3.838, 3.837, 3.845], 10.83, 0.027, 0.031),
    ("16M mu-centering", [3.962, 3.881, 3.850, 3.842, 3.843, 3.844, 3.842], 10.83, 0.024, 0.028),
    ("57M none", [3.442, 3.387, 3.372, 3.369, 3.397, 3.614, 6.050], 10.83, 0.435, 0.508),
    ("57M z-loss", [3.442, 3.385, 3.367, 3.366, 3.382, 3.452, 4.578], 10.83, 0.201, 0.235),
    ("221M none", [3.090, 3.050, 3.050, 3.076, 3.153, 3.305, 5.099], 10.85, 0.353, 0.412),
    ("221M z-loss", [3.089, 3.050, 3.049, 3.069, 3.091, 3.173, 3.478], 10.85, 0.094, 0.109),
]


@pytest.mark.parametrize(
    ("losses", "l0", "by_n", "by_n_1"), [row[1:] for row in PUBLISHED], ids=[r[0] for r in PUBLISHED]
)
def test_published_table(losses, l0, by_n, by_n_1):
    result = lr_sensitivity(losses, l0)
    # Losses and sensitivities are printed with three digits.
    assert result.value == pytest.approx(by_n, abs=0.0006)
    assert lr_sensitivity(losses, l0, divisor="n-1").value == pytest.approx(by_n_1, abs=0.0006)
    assert (result.lowest, result.argmin) == (min(losses), int(np.argmin(losses)))
    assert result.value_l0 == result.value
    assert not result.at_chance


@pytest.mark.parametrize(("row", "expected"), [(4, 1.118), (5, 1.095)])
def test_putting_l0_for_finite_divergences_swallows_the_effect(row, expected):
    losses, l0 = PUBLISHED[row][1:3]
    result = lr_sensitivity(losses, l0, diverged=[False] * 6 + [True])
    assert result.value == pytest.approx(PUBLISHED[row][3], abs=0.0006)
    assert result.value_l0 == pytest.approx(expected, abs=0.001)


def test_nonfinite_becomes_l0_and_is_never_the_lowest():
    result = lr_sensitivity([3.0, 2.0, NAN, INF, -INF], 5.0)
    assert result.value == pytest.approx((1 + 0 + 3 + 3 + 3) / 5)
    assert (result.lowest, result.argmin, result.n_nonfinite, result.n) == (2.0, 1, 3, 5)


def test_above_l0_counts_as_l0():
    assert lr_sensitivity([2.0, 9.0], 5.0).value == 1.5


def test_undefined_has_a_reason():
    for losses, words in (
        ([NAN, NAN], "none of the 2"),
        ([2.0, None, 3.0], "1 of 3"),
        ([2.0], "grid of 1"),
        ([], "grid of 0"),
    ):
        result = lr_sensitivity(losses, 5.0)
        assert (result.value, result.value_l0) == (None, None)
        assert words in str(result.reason)


def test_at_edge_and_at_chance():
    assert [lr_sensitivity(losses, 5.0).at_edge for losses in ([1, 2, 3], [2, 1, 3], [3, 2, 1])] == [True, False, True]
    stuck = lr_sensitivity([4.96, 5.2, 6.0], 5.0)
    assert (stuck.at_chance, stuck.value) == (True, pytest.approx(0.08 / 3))
    assert lr_sensitivity([6.0, 7.0], 5.0).value == 0.0
    assert not lr_sensitivity([4.94, 5.2], 5.0).at_chance


def test_bad_input():
    for l0 in (NAN, INF):
        with pytest.raises(ValueError, match="l0 is"):
            lr_sensitivity([1.0, 2.0], l0)
    with pytest.raises(ValueError, match="divisor"):
        lr_sensitivity([1.0, 2.0], 5.0, divisor="n+1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="entries of diverged"):
        lr_sensitivity([1.0, 2.0], 5.0, diverged=[True])
    with pytest.raises(ValueError, match="ascend"):
        usable_range([2e-3, 1e-3], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 learning rates, but 1 losses"):
        usable_range([1e-3, 2e-3], [1.0])
    with pytest.raises(ValueError, match="at least one seed"):
        largest_stable_lr([1e-3], [[]])


def test_usable_range():
    result = usable_range(LRS, PUBLISHED[0][1])
    assert result is not None
    assert (result.best, result.usable, result.edge) == (1e-2, (3e-3, 1e-2, 3e-2), 1e-1)
    calm = usable_range(LRS, PUBLISHED[2][1])
    assert calm is not None
    assert calm.edge is None
    assert calm.usable == (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def test_usable_range_with_bad_and_missing_runs():
    result = usable_range([1, 2, 3, 4], [2.0, 2.02, None, NAN])
    assert result is not None
    assert (result.usable, result.near, result.edge) == ((1, 2), (1, 2), 4)
    bad = usable_range([1, 2, 3], [-INF, 2.0, 2.05])
    assert bad is not None
    assert (bad.usable, bad.near, bad.edge) == ((2,), (2, 3), None)
    assert usable_range([1, 2], [NAN, None]) is None


def test_bracket():
    inner = largest_stable_lr([1, 2, 4, 8], [[True, True], [True, True], [True, False], [False, False]])
    assert (inner.low, inner.high, inner.censored, inner.monotone) == (2, 4, None, True)
    assert inner.fraction == (1.0, 1.0, 0.5, 0.0)
    assert str(inner) == "[2, 4)"
    everything = largest_stable_lr([1, 2], [[True], [True]])
    assert (everything.low, everything.high, everything.censored, str(everything)) == (2, None, "high", ">= 2")
    nothing = largest_stable_lr([1, 2], [[False], [False]])
    assert (nothing.low, nothing.high, nothing.censored, str(nothing)) == (None, 1, "low", "< 1")


def test_a_stable_run_above_an_unstable_one_is_listed():
    bracket = largest_stable_lr([1, 2, 4, 8], [[True], [False], [True], [False]])
    assert (bracket.low, bracket.high, bracket.monotone, bracket.stable_above) == (1, 2, False, (4,))


def test_ratio_is_an_interval():
    # Published as "1.5 times": stable at 60e-3 and not at 80e-3, against 40e-3 and 60e-3.
    grid = [6e-3, 8e-3, 20e-3, 40e-3, 60e-3, 80e-3]
    qkv = largest_stable_lr(grid, [[True]] * 5 + [[False]])
    qk = largest_stable_lr(grid, [[True]] * 4 + [[False]] * 2)
    assert ratio_interval(qkv, qk) == (pytest.approx(1.0), pytest.approx(2.0))
    open_high = largest_stable_lr(grid, [[True]] * 6)
    assert ratio_interval(open_high, qk) == (pytest.approx(80 / 60), math.inf)
    assert ratio_interval(qk, open_high) == (0.0, pytest.approx(60 / 80))


def test_refine():
    assert refine(Bracket(1e-3, 1e-1, None, True, ())) == pytest.approx(1e-2)
    for bracket, end in (
        (Bracket(None, 1.0, "low", True, ()), "lower"),
        (Bracket(1.0, None, "high", True, ()), "higher"),
    ):
        with pytest.raises(ValueError, match=f"{end} ones"):
            refine(bracket)


def test_published_decimals_at_the_limits():
    assert 4.001 - 3.901 > 0.1  # as floats
    found = usable_range([1.0, 2.0, 3.0], [3.901, 3.921, 4.001])
    assert found is not None
    assert (found.usable, found.near, found.edge) == ((1.0, 2.0), (1.0, 2.0, 3.0), None)
    beyond = usable_range([1.0, 2.0], [3.901, 4.002])
    assert beyond is not None
    assert beyond.edge == 2.0
