"""Intervals, tests and sample sizes equal those of scipy and statsmodels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from stability_lab.compare.statistics import (
    Difference,
    family,
    holm,
    paired_difference,
    seeds_for,
    t_interval,
    t_power,
)

A = [1.769, 1.758, 1.781, 1.764]
B = [1.771, 1.766, 1.779, 1.773]


@pytest.mark.oracle
def test_the_interval_is_scipys() -> None:
    mean = t_interval(A)
    expected = stats.ttest_1samp(A, 0.0).confidence_interval(0.95)
    assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert mean.value == pytest.approx(np.mean(A), rel=1e-15)
    assert mean.half == pytest.approx((expected.high - expected.low) / 2, rel=1e-9)


def test_one_value_has_no_interval_and_none_is_refused() -> None:
    assert t_interval([2.0]).half is None
    for bad in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="must be finite"):
            t_interval(bad)


@pytest.mark.oracle
def test_pairs_are_scipys_related_test() -> None:
    difference = paired_difference(A, B)
    expected: Any = stats.ttest_rel(A, B)
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-12)
    interval = expected.confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert (difference.method, difference.n) == ("paired", 4)


def test_equal_pairs_are_identical_and_equal_differences_have_no_spread() -> None:
    same = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert same.identical
    assert same.p == 1.0
    shifted = paired_difference([2.0, 3.0], [1.0, 2.0])
    assert not shifted.identical
    assert (shifted.low, shifted.high, shifted.p) == (1.0, 1.0, 0.0)
    single = paired_difference([2.0], [1.0])
    assert (single.low, single.p, single.n) == (None, None, 1)


def test_sums_beyond_the_largest_float_are_infinite_without_a_warning() -> None:
    large, opposite = [1e308, 1.5e308], [-1e308, -1e308]
    assert t_interval(large).value == math.inf
    assert paired_difference(large, opposite).value == math.inf


def test_unequal_lengths_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference([1.0], [1.0, 2.0])


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(5))
def test_holm_is_that_of_statsmodels(seed: int) -> None:
    from statsmodels.stats.multitest import multipletests

    ps = np.random.default_rng(seed).uniform(0, 0.2, size=9).tolist()
    expected: Any = multipletests(ps, method="holm")[1]
    assert holm(ps) == pytest.approx(list(expected), rel=1e-12)


def test_holm_leaves_out_what_was_not_tested() -> None:
    adjusted = holm([0.01, None, 0.04, 0.03])
    assert adjusted[1] is None
    assert adjusted == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.oracle
@pytest.mark.parametrize(("effect", "spread"), [(0.5, 1.0), (0.02, 0.03), (1.0, 0.4), (0.1, 1.0)])
def test_sample_sizes_are_those_of_statsmodels(effect: float, spread: float) -> None:
    from statsmodels.stats.power import TTestIndPower, TTestPower

    one = TTestPower().solve_power(effect_size=effect / spread, power=0.8, alpha=0.05, alternative="two-sided")
    assert seeds_for(effect, spread) == max(2, int(np.ceil(one)))
    two = TTestIndPower().solve_power(effect_size=effect / spread, power=0.8, alpha=0.05, alternative="two-sided")
    found = seeds_for(effect, spread * math.sqrt(2), df=2)
    assert found == (None if two > 1000 else max(2, int(np.ceil(two))))


@pytest.mark.oracle
@pytest.mark.parametrize("tests", [1, 7])
def test_power_is_that_of_an_integration_also_for_large_effects(tests: int) -> None:
    """scipy's other tail is NaN from an effect of some standard errors on: the seeds were too few there."""
    level = 1 - 0.05 / tests

    def power(noncentrality: float, df: int) -> float:
        limit = stats.t.ppf((1 + level) / 2, df)

        def density(scale: float) -> float:
            normal = stats.norm.sf(limit * scale - noncentrality) + stats.norm.cdf(-limit * scale - noncentrality)
            return float(normal * stats.chi.pdf(scale * math.sqrt(df), df) * math.sqrt(df))

        return integrate.quad(density, 0, 8, limit=400, points=[0.5, 1, 1.5, 2])[0]

    for effect in np.arange(0.5, 9.0, 0.5):
        n = seeds_for(float(effect), 1.0, tests=tests)
        assert n is not None
        assert t_power(effect * math.sqrt(n), n - 1, level) == pytest.approx(
            power(effect * math.sqrt(n), n - 1), abs=1e-8
        )
        assert power(effect * math.sqrt(n), n - 1) >= 0.8
        assert n == 2 or power(effect * math.sqrt(n - 1), n - 2) < 0.8
    assert seeds_for(1e300, 1.0) == 2


def test_a_missing_difference_makes_no_other_clearer() -> None:
    clear = paired_difference([1.0, 1.1, 1.2, 1.3], [1.05, 1.12, 1.26, 1.33])
    (alone,), (among, none) = family([clear]), family([clear, None], planned=2)
    assert alone is not None
    assert among is not None
    assert none is None
    assert clear.p is not None
    assert (alone.p_holm, alone.tests) == (clear.p, 1)
    assert (among.p_holm, among.tests) == (2 * clear.p, 2)


@pytest.mark.oracle
def test_cohens_published_sample_size() -> None:
    """Cohen (1992), table 2: a medium effect (d = 0.5) at 5% and 80% power needs 64 in each of two groups."""
    assert seeds_for(0.5, math.sqrt(2), df=2) == 64


def test_power_is_what_a_simulation_finds() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0.8, 1.0, size=(20_000, 8))
    test: Any = stats.ttest_1samp(x, 0.0, axis=1)
    found = float(np.mean(test.pvalue < 0.05))
    assert t_power(0.8 * np.sqrt(8), 7) == pytest.approx(found, abs=0.012)


def test_nothing_needs_seeds_without_an_effect_or_a_spread() -> None:
    assert seeds_for(0.0, 1.0) is None
    assert seeds_for(1.0, 0.0) is None
    assert seeds_for(1e-6, 1.0) is None


def test_seeds_are_asked_for_only_where_the_difference_is_not_resolved_in_its_family() -> None:
    open_one = paired_difference([1.0, 1.2, 0.9], [1.05, 1.1, 1.0])
    clear = paired_difference([1.0, 1.2, 0.9], [2.0, 2.2, 1.91])
    single = paired_difference([1.0], [2.0])
    found = family([open_one, None, clear, single])
    assert found[1] is None
    assert [d and d.significant for d in found] == [False, None, True, None]
    assert found[0] is not None
    assert found[0].seeds_needed == seeds_for(open_one.value, open_one.spread or 0.0, tests=2)
    assert found[2] is not None
    assert found[2].seeds_needed is None


def test_a_difference_that_only_the_correction_takes_away_needs_seeds_too() -> None:
    borderline = paired_difference([1.0, 1.1, 1.2, 1.3], [1.05, 1.12, 1.26, 1.33])
    assert borderline.p is not None
    assert borderline.p < 0.05
    (alone,) = family([borderline])
    assert alone is not None
    assert alone.significant
    among = family([borderline] * 20)[0]
    assert among is not None
    assert not among.significant
    assert among.seeds_needed is not None
    assert among.seeds_needed > 4


@pytest.mark.oracle
def test_sample_sizes_of_a_corrected_test_are_those_of_statsmodels() -> None:
    from statsmodels.stats.power import TTestPower

    expected = TTestPower().solve_power(effect_size=0.5, power=0.8, alpha=0.05 / 9, alternative="two-sided")
    assert seeds_for(0.5, 1.0, tests=9) == int(np.ceil(expected))


def difference(value: float, spread: float, n: int, df: float) -> Difference:
    found = family([Difference(value, -1.0, 1.0, 0.5, n, "paired", spread, df)])[0]
    assert found is not None
    return found


def test_seeds_are_a_range_by_the_chi_square_interval_of_the_spread() -> None:
    found = difference(0.5, 1.0, 8, 7.0)
    few, many = (math.sqrt(7 / stats.chi2.ppf(tail, 7)) for tail in (0.975, 0.025))
    assert (few, many) == pytest.approx((0.661, 2.035), abs=1e-3)
    assert found.seeds_range == (seeds_for(0.5, few), seeds_for(0.5, many))
    assert found.seeds_needed is not None
    assert found.seeds_range is not None
    assert found.seeds_range[0] < found.seeds_needed < found.seeds_range[1]


def test_no_number_of_seeds_where_it_would_be_a_guess() -> None:
    assert difference(0.5, 1.0, 4, 3.0).seeds_range is None  # a spread known to a factor of 6
    assert difference(0.3, 1.0, 8, 7.0).seeds_range is None  # less than its standard error of 0.35
    assert difference(0.14, 1.0, 60, 4.0).seeds_range is None  # an end above 1,000
