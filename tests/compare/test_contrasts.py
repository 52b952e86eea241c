"""Tests between arms: Student's and Welch's in one setting, and what other arms and settings add to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from stability_lab.compare.contrasts import Contrast, difference_by_seed, differences
from stability_lab.compare.statistics import Difference

A = [1.769, 1.758, 1.781, 1.764]
B = [1.771, 1.766, 1.779, 1.773]


def by_seed(values) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


def arms_compared(own, other, *beside, paired: bool = True) -> Difference:
    found = difference_by_seed(by_seed(own), by_seed(other), paired, [by_seed(arm) for arm in beside])
    assert found is not None
    return found


def in_settings(tables: np.ndarray, paired: bool = True) -> list[Difference]:
    """Arm 1 minus arm 0 in each setting of (settings, arms, seeds)."""
    contrasts = [Contrast((by_seed(t[1]), by_seed(t[0])), tuple(map(by_seed, t[2:]))) for t in tables]
    return [one for one in differences(contrasts, paired) if one is not None]


@pytest.mark.oracle
def test_two_arms_are_scipys_related_test() -> None:
    found, expected = arms_compared(A, B), stats.ttest_rel(A, B)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (found.method, found.n, found.df) == ("paired", 4, pytest.approx(3))


@pytest.mark.oracle
@pytest.mark.parametrize("beside", [[], [[1.2, 1.9, 1.1]]])
def test_independent_samples_of_one_setting_are_scipys_welch_test(beside) -> None:
    b = [*B, 1.802]
    found = arms_compared(A, b, *beside, paired=False)
    expected: Any = stats.ttest_ind(A, b, equal_var=False)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (found.n, found.df) == (4, pytest.approx(expected.df))


def test_pairing_finds_what_independent_samples_hide() -> None:
    """Seeds differ by 0.1, the arms by 0.01 on each of them."""
    base = [1.7, 1.8, 1.9, 2.0]
    arm = [value - 0.01 + wiggle for value, wiggle in zip(base, (0.001, -0.001, 0.0005, 0.0), strict=True)]
    paired, welch = arms_compared(arm, base), arms_compared(arm, base, paired=False)
    assert paired.value == pytest.approx(welch.value)
    assert paired.p is not None
    assert welch.p is not None
    assert paired.p < 0.001 < 0.5 < welch.p


def test_seeds_are_taken_out_where_they_explain_variance_and_only_there() -> None:
    """p of the F test of the seeds, by hand: 10.33 of 2 and 4 degrees of freedom is 0.026, 6.33 is 0.058."""
    seeds, noise = np.array([-1.0, 0.0, 1.0]), np.array([[1, -2, 1], [-1, 2, -1], [0, 0, 0]]) / 4
    for size, method in ((math.sqrt(10.333 / 16), "paired"), (math.sqrt(6.333 / 16), "welch")):
        table = size * seeds + noise
        residual = float((noise**2).sum()) / 4
        assert 3 * float((size * seeds).var(ddof=1)) / residual == pytest.approx(16 * size**2 / 1, rel=1e-9)
        found = arms_compared(table[0] + 5, table[1], table[2] - 7)
        assert found.method == method


def test_an_arm_that_lacks_a_seed_of_the_pair_says_nothing_about_seeds() -> None:
    alone, beside = arms_compared(A, B), arms_compared(A, B, A[:3])
    assert beside == alone


@pytest.mark.parametrize("paired", [True, False])
def test_other_settings_add_degrees_of_freedom_and_change_no_difference(paired: bool) -> None:
    rng = np.random.default_rng(3)
    tables = rng.normal(size=(3, 4, 3)) + 5 * paired * rng.normal(size=(3, 1, 3))
    together, alone = in_settings(tables, paired), [in_settings(table[None], paired)[0] for table in tables]
    assert {one.method for one in together} == {"paired" if paired else "welch"}
    for one, by_itself in zip(together, alone, strict=True):
        assert one.value == by_itself.value
    mean_df = [math.fsum(one.df or 0 for one in some) / 3 for some in (together, alone)]
    assert mean_df[0] > 1.3 * mean_df[1]


def test_with_equal_squares_the_degrees_of_freedom_are_those_of_the_formula() -> None:
    """Four arms, three settings, three seeds, all mean squares equal: own weight 1/2, h 1/2 and w 1/4 for each of the
    two arms. 1/df = (2 (3/8)^2 + 2 (1/8)^2 + (2/8) (4 (1/4)^2) / 2) / 2."""
    one = np.array([[-1.0, 0.0, 1.0], [0.0, 1.0, -1.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    found = in_settings(np.stack([one, 2 * one, 7 * one]), paired=False)
    expected = (2 * (3 / 8) ** 2 + 2 * (1 / 8) ** 2 + (1 / 4) * 4 * (1 / 4) ** 2 / 2) / 2
    assert [d.df for d in found] == pytest.approx([1 / expected] * 3)
    assert [d.spread for d in found] == pytest.approx([math.sqrt(2), 2 * math.sqrt(2), 7 * math.sqrt(2)])


def test_degrees_of_freedom_of_unequal_arms_beside_and_of_pairs_are_those_of_the_formula() -> None:
    """Three settings, three seeds, four arms. Welch with mean squares 1, 1, 1 and 4: h 1/2 and w 1/7 for each compared
    arm, 5/7 for the rest, whose Satterthwaite degrees of freedom are 100/34. Pairs with equal mean squares: h 1 and w
    1/3 for the contrast, 2/3 for the rest, which has four."""
    wave = np.array([-1.0, 0.0, 1.0])
    welch = in_settings(np.stack([np.outer([1, 1, 1, 2], wave)] * 3), paired=False)
    expected = 2 * ((0.5 * (1 / 2 - 1 / 7) + 1 / 7) ** 2 + (1 / 2 - 1 / 7) ** 2 / 8) / 2 + 3 / 8 * (5 / 7) ** 2 / (
        100 / 34
    )
    assert [one.df for one in welch] == pytest.approx([1 / expected] * 3)
    arms = np.array([[-1, 1, 0, 0], [1, 1, -2, 0], [1, 1, 1, -3]]) / np.sqrt([[2], [6], [12]])
    seeds = np.array([[1, -1, 0], np.array([1, 1, -2]) / math.sqrt(3), [1, -1, 0]])
    pairs = in_settings(np.stack([arms.T @ seeds + 9 * wave] * 3))
    expected = ((0.5 * (1 - 1 / 3) + 1 / 3) ** 2 + (1 - 1 / 3) ** 2 / 8) / 2 + 3 / 8 * (2 / 3) ** 2 / 4
    assert [(one.method, one.df) for one in pairs] == [("paired", pytest.approx(1 / expected))] * 3


def test_the_same_arms_spread_elsewhere_counts_and_the_size_of_it_does_not() -> None:
    """An arm that varies five times as much as the others at the other rates is trusted less at this one."""
    calm = np.array([[-1.0, 0.0, 1.0], [0.0, 1.0, -1.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    wild = calm * np.array([[1.0], [5.0], [1.0], [1.0]])
    like_others, unlike = (in_settings(np.stack([calm, 3 * other]), paired=False)[0] for other in (calm, wild))
    assert like_others.spread == pytest.approx(math.sqrt(2))
    assert unlike.spread == pytest.approx(math.sqrt((2 + (25 + 1) / 7) / 2))  # of all arms the mean square is 7 there
    assert in_settings(np.stack([calm, 100 * wild]), paired=False)[0].spread == pytest.approx(unlike.spread)


def test_arms_change_sides_and_the_result_changes_sign() -> None:
    tables = np.random.default_rng(5).normal(size=(2, 4, 3))
    one, other = in_settings(tables), in_settings(tables[:, [1, 0, 2, 3]])
    for a, b in zip(one, other, strict=True):
        assert (a.value, a.p, a.low, a.df) == pytest.approx((-b.value, b.p, -(b.high or 0), b.df))


def test_an_interaction_is_a_contrast_of_four_arms() -> None:
    table = np.random.default_rng(7).normal(size=(4, 5)) + 9 * np.random.default_rng(8).normal(size=5)
    (found,) = differences([Contrast(tuple(map(by_seed, table)), (), (1.0, -1.0, -1.0, 1.0))], True)
    assert found is not None
    expected: Any = stats.ttest_1samp(table[0] - table[1] - table[2] + table[3], 0.0)
    assert (found.method, found.p) == ("paired", pytest.approx(expected.pvalue, rel=1e-9))


def test_equal_pairs_are_identical_whatever_the_other_arms_do() -> None:
    same = arms_compared([1.0, 2.0], [1.0, 2.0], [1.3, 1.1], [9.0, 2.0])
    assert same.identical
    assert same.p == 1.0
    shifted = arms_compared([2.0, 3.0], [1.0, 2.0])
    assert not shifted.identical
    assert (shifted.low, shifted.high, shifted.p) == (1.0, 1.0, 0.0)
    assert arms_compared([2.0, 2.0], [1.0, 1.0], paired=False).p == 0.0


def test_one_seed_has_no_test_and_an_arm_without_a_value_no_difference() -> None:
    single = arms_compared([2.0], [1.0])
    assert (single.value, single.low, single.p, single.n, single.method) == (1.0, None, None, 1, "paired")
    assert arms_compared([2.0], [1.0, 1.5], paired=False).p is None
    assert arms_compared([2.0], [1.0, 1.5], paired=False).value == 0.75
    assert difference_by_seed({}, {0: 1.0}, True) is None


def test_pairs_are_the_seeds_that_both_arms_have_and_too_few_are_compared_by_welch() -> None:
    found = difference_by_seed({0: 1.0, 1: 2.0, 2: 3.0}, {1: 1.5, 2: 2.6, 3: 9.0}, True)
    assert found is not None
    assert (found.method, found.n, found.value) == ("paired", 2, pytest.approx(0.45))
    apart = difference_by_seed({0: 1.0, 1: 2.0}, {1: 1.5, 3: 9.0}, True)
    assert apart is not None
    assert (apart.method, apart.value) == ("welch", pytest.approx(1.5 - 5.25))


def test_what_is_not_finite_is_refused_and_large_sums_are_infinite() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        arms_compared([1.0, math.nan], [1.0, 2.0])
    assert arms_compared([1e308, 1.5e308], [-1e308, -1e308], paired=False).value == math.inf
