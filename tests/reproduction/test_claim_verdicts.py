"""Verdicts: each can be reached, and swapping the arms turns those with a direction round."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t
from statsmodels.stats.weightstats import ttost_paired

from stability_lab.compare.contrasts import difference_by_seed
from stability_lab.compare.statistics import equivalence, family, paired_difference, seeds_for
from stability_lab.judge.lr_sensitivity import Bracket
from stability_lab.reproduction.claim_verdicts import (
    ABSENT,
    AGREES,
    CONTRADICTS,
    NOT_RESOLVABLE,
    NOT_STATED,
    OPPOSITE,
    SAME,
    SAME_RESOLVED,
    SMALLER,
    VERDICTS,
    equal,
    exact,
    printed_difference,
    signed,
    spike_rates,
    stable_rates,
)

TURNED = {SAME_RESOLVED: CONTRADICTS, CONTRADICTS: SAME_RESOLVED, SAME: OPPOSITE, OPPOSITE: SAME}
LOW = [1.80, 1.82, 1.79, 1.81]
HIGH = [1.90, 1.91, 1.90, 1.92]
NEAR = [1.83, 1.80, 1.80, 1.83]


GRID = (1e-3, 3e-3, 1e-2, 3e-2)


def bracket(low: float | None, high: float | None, monotone: bool = True, beyond: float = 0.0) -> Bracket:
    """`beyond` is the stable part of the seeds above it."""
    fraction = tuple(1.0 if high is None or lr < high else beyond for lr in GRID)
    return Bracket(low, high, "low" if low is None else "high" if high is None else None, monotone, fraction)


@pytest.mark.parametrize(("a", "b"), [(LOW, HIGH), (HIGH, LOW), (LOW, NEAR), (NEAR, LOW)])
@pytest.mark.parametrize("paired", [True, False])
def test_swapping_the_arms_turns_the_verdict_round(paired: bool, a, b) -> None:
    def difference(x, y):
        found = difference_by_seed(dict(enumerate(x)), dict(enumerate(y)), paired)
        assert found is not None
        return found

    for direction in (1, -1):
        one, other = signed(difference(a, b), direction), signed(difference(b, a), direction)
        assert one.verdict == TURNED[other.verdict]
        assert one.verdict == signed(difference(b, a), -direction).verdict


def test_a_difference_and_its_direction() -> None:
    assert signed(paired_difference(LOW, HIGH), -1).verdict == SAME_RESOLVED
    assert signed(paired_difference(LOW, HIGH), 1).verdict == CONTRADICTS
    near = signed(paired_difference(LOW, NEAR), -1)
    assert near.verdict == SAME
    assert near.value == pytest.approx(-0.01)
    assert near.low is not None
    assert near.high is not None
    assert near.low < -0.01 < 0 < near.high < -near.low
    assert near.detail == "p 0.42; it would take about 39 seeds"  # (2.8 / 0.463)^2, and two for the t
    assert signed(paired_difference([1.8], [1.9]), 1).verdict == OPPOSITE
    assert signed(paired_difference([1.8], [1.9]), 1).detail == "one seed: no test"
    assert signed(paired_difference(LOW, LOW), 1).verdict == NOT_RESOLVABLE


def test_a_p_corrected_for_the_number_of_tests_decides() -> None:
    clear = paired_difference(LOW, HIGH)
    assert clear.p is not None
    assert clear.p < 0.01
    many = family([clear, *[paired_difference(LOW, NEAR)] * 400])
    assert many[0] is not None
    assert many[0].p_holm == pytest.approx(401 * clear.p)
    corrected = signed(many[0], -1)
    assert corrected.verdict == SAME
    p = 401 * clear.p
    assert corrected.detail == f"p {p:.2g} by Holm, 401 tests; it would take about {many[0].seeds_needed} seeds"


def test_what_cannot_show_the_published_difference_says_nothing_of_its_sign() -> None:
    d = paired_difference(LOW, NEAR)
    assert d.spread is not None
    needed = seeds_for(0.01, d.spread)
    assert needed is not None
    assert needed > 4
    small = signed(d, -1, effect=-0.01)
    assert (small.verdict, small.detail) == (
        NOT_RESOLVABLE,
        f"p 0.42; the published difference would take about {needed} seeds",
    )
    # Among more tests the same difference takes more seeds: ours are enough for 5%, and not for a fifth of it.
    just = next(effect for effect in np.arange(0.03, 0.1, 0.001) if (seeds_for(effect, d.spread) or 99) <= 4)
    d = paired_difference([value - 0.015 for value in LOW], NEAR)
    assert signed(d, -1, effect=-just).verdict == SAME
    fifth = family([d], planned=5)[0]
    assert fifth is not None
    assert signed(fifth, -1, effect=-just).verdict == NOT_RESOLVABLE
    # A published difference inside of the interval is no news.
    assert signed(d, -1, effect=2 * d.value).detail.endswith("seeds")
    # What is resolved stays so, however small the published difference is.
    assert signed(paired_difference(LOW, HIGH), -1, effect=-1e-6).verdict == SAME_RESOLVED


def test_a_test_that_excludes_the_published_difference_resolves_that_ours_is_smaller() -> None:
    d = paired_difference(LOW, NEAR)
    found = signed(d, -1, effect=-0.06)
    pairs = np.array(LOW) - np.array(NEAR)
    p = float(2 * t.sf(abs(pairs.mean() + 0.06) / (pairs.std(ddof=1) / 2), 3))
    assert (found.verdict, found.detail) == (SMALLER, f"p 0.42; the published -0.06 is excluded with p {p:.2g}")
    # The test is one of as many as the part has.
    among, alone = family([d], planned=3)[0], family([d], planned=2)[0]
    assert among is not None
    assert alone is not None
    assert 2 * p < 0.05 < 3 * p
    assert signed(alone, -1, effect=-0.06).detail.endswith(f"with p {2 * p:.2g} by Bonferroni, 2 tests")
    assert signed(among, -1, effect=-0.06).verdict == NOT_RESOLVABLE
    assert signed(paired_difference(NEAR, LOW), 1, effect=1.0).verdict == SMALLER
    # An interval on the far side of the published difference, which Holm's rule leaves unresolved, is not smaller.
    large = family([paired_difference(LOW, HIGH)], planned=400)[0]
    assert large is not None
    assert large.high is not None
    assert large.high < -0.01
    assert signed(large, -1, effect=-0.01).verdict == NOT_RESOLVABLE


def test_a_spread_that_drowns_everything() -> None:
    hopeless = signed(paired_difference([1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, -1.0, 1.001]), 1)
    assert (hopeless.verdict, hopeless.detail) == (
        NOT_RESOLVABLE,
        "p 1.00; a difference of this size would take more than 1,000 seeds",
    )


def test_exact_values_within_half_of_the_last_digit() -> None:
    assert exact(29.9237, 29.92, 5e-3).verdict == AGREES
    assert exact(27.933, 29.09, 5e-3).verdict == CONTRADICTS
    assert exact(1.0, 1.0, 0.0).verdict == AGREES
    assert exact(math.nan, 1.0, 10.0).verdict == CONTRADICTS


@pytest.mark.oracle
@pytest.mark.parametrize("margin", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("shift", [0.0, 0.013, -0.04])
def test_equivalence_is_that_of_statsmodels(margin: float, shift: float) -> None:
    a, b = np.array(LOW) + shift, np.array(NEAR)
    expected = ttost_paired(a, b, -margin, margin)[0]
    assert equivalence(a.tolist(), b.tolist(), margin).p == pytest.approx(expected, rel=1e-9)


def test_equality_is_shown_or_refuted_or_neither_and_knows_no_order() -> None:
    for a, b in ((LOW, NEAR), (NEAR, LOW)):
        assert equal(a, b, 0.1).verdict == SAME_RESOLVED
        assert equal(a, b, 0.01).verdict == NOT_RESOLVABLE
    assert equal([0.028, 0.032, 0.03, 0.03], [0.0] * 4, 0.03).detail == "neither within 0.03 nor beyond it"
    assert equal(LOW, NEAR, 0.01).detail.startswith("equality within 0.01 would take about ")
    for a, b in ((LOW, HIGH), (HIGH, LOW)):
        assert equal(a, b, 0.02).verdict == CONTRADICTS
    assert equal([1.0], [1.0], 0.1).verdict == NOT_RESOLVABLE
    with pytest.raises(ValueError, match="margin is 0"):
        equal(LOW, HIGH, 0)


@pytest.mark.slow
def test_the_pairs_that_equality_would_take_have_the_power_they_promise() -> None:
    found = equivalence(LOW, NEAR, 0.01)
    assert found.p is not None
    assert found.pairs_needed is not None
    assert found.low is not None
    spread = np.std(np.array(LOW) - np.array(NEAR), ddof=1)
    rng = np.random.default_rng(0)

    def power(n: int) -> float:
        zero = [0.0] * n
        ps = (equivalence(row, zero, 0.01).p for row in rng.normal(0, spread, (1500, n)).tolist())
        return sum(p is not None and p <= 0.05 for p in ps) / 1500

    assert power(found.pairs_needed) == pytest.approx(0.8, abs=0.06)


def test_printed_values_are_tested_with_their_own_uncertainty() -> None:
    # 11.24 against 11.19 +-0.1: 0.05 / 0.0722 standard errors; 10.84: 0.35 / 0.0722.
    worse = printed_difference(11.24, 11.19, 0.1, 1)
    assert (worse.verdict, worse.detail) == (SAME, "0.7 standard errors")
    assert worse.high == pytest.approx(0.05 + 0.1 * math.sqrt(2))
    assert printed_difference(10.84, 11.19, 0.1, -1).verdict == SAME_RESOLVED
    assert printed_difference(11.19, 10.84, 0.1, -1).verdict == CONTRADICTS
    assert printed_difference(11.19, 11.24, 0.1, 1).verdict == OPPOSITE


def test_too_few_scored_steps_for_the_published_rates() -> None:
    # 4 (p + q) / (p - q)^2, doubled for 80% power: 2,513 for 0.03% against 0.40%.
    clear = paired_difference([0.1, 0.2, 0.1], [0.9, 1.0, 0.9])
    short = spike_rates(clear, ((3, 2000), (80, 9000)), (0.03, 0.40))
    assert short.verdict == NOT_RESOLVABLE
    words = "3 spikes in 2,000 scored steps against 80 in 9,000"
    assert short.detail == f"{words}; the published rates would take 2,513 in each arm"
    enough = ((3, 2600), (24, 2600))
    assert spike_rates(clear, enough, (0.03, 0.40)).verdict == SAME_RESOLVED
    assert spike_rates(clear, enough, (0.40, 0.03)).verdict == CONTRADICTS
    assert "take 93,097 in each arm" in spike_rates(None, enough, (0.069, 0.108)).detail


def test_runs_with_one_spike_each_are_no_proof() -> None:
    """Three against none: no spread over runs, and yet chance, 2 (1/2)^3 by Fisher's test of rare events."""
    one = paired_difference([0.1, 0.1, 0.1], [0.0, 0.0, 0.0])
    assert one.p is not None
    assert one.p < 1e-30
    found = spike_rates(one, ((3, 3000), (0, 3000)), (0.40, 0.03))
    assert (found.verdict, found.low) == (SAME, None)
    assert found.detail == "3 spikes in 3,000 scored steps against 0 in 3,000; p 0.25"
    assert spike_rates(one, ((3, 3000), (0, 3000)), (0.03, 0.40)).verdict == OPPOSITE
    assert spike_rates(one, ((9, 3000), (0, 3000)), (0.40, 0.03)).verdict == SAME_RESOLVED
    assert spike_rates(paired_difference([0.1], [0.0]), ((3, 3000), (0, 3000)), (0.40, 0.03)).verdict == SAME
    none = spike_rates(paired_difference([0.0, 0.0], [0.0, 0.0]), ((0, 3000), (0, 3000)), (0.40, 0.03))
    assert none.verdict == NOT_RESOLVABLE


def test_brackets_that_do_not_touch_resolve_an_order() -> None:
    low, high, same = bracket(1e-3, 3e-3), bracket(1e-2, 3e-2), bracket(1e-3, 3e-3)
    assert stable_rates(high, low, 1, 3).verdict == SAME_RESOLVED
    assert stable_rates(low, high, 1, 3).verdict == CONTRADICTS
    assert stable_rates(low, high, -1, 3).verdict == SAME_RESOLVED
    assert (stable_rates(high, low, 1, 3).low, stable_rates(high, low, 1, 3).high) == pytest.approx((1e-2 / 3e-3, 30))
    assert stable_rates(low, same, 1, 3).verdict == NOT_RESOLVABLE
    # Neighbours share an end: the threshold below it is the smaller.
    assert stable_rates(bracket(3e-3, 1e-2), low, 1, 3).verdict == SAME_RESOLVED
    assert stable_rates(bracket(3e-3, None), low, 1, 3).verdict == SAME_RESOLVED
    assert stable_rates(bracket(3e-3, None), bracket(3e-3, None), 1, 3).verdict == NOT_RESOLVABLE
    assert stable_rates(bracket(None, 1e-3), low, 1, 3).verdict == CONTRADICTS
    assert stable_rates(high, low, 1, 1).verdict == SAME
    assert stable_rates(low, high, 1, 1).verdict == OPPOSITE
    odd = stable_rates(high, bracket(1e-3, 3e-3, monotone=False), 1, 3)
    assert odd.verdict == SAME
    assert "stable again" in odd.detail


def test_one_unstable_run_of_three_orders_no_arms() -> None:
    """A bracket ends where the first seed fails, so that more seeds alone would move it."""
    high, chance = bracket(1e-2, 3e-2), bracket(1e-3, 3e-3, beyond=2 / 3)
    assert stable_rates(high, chance, 1, 3).verdict == SAME
    assert stable_rates(chance, high, 1, 3).verdict == OPPOSITE
    assert stable_rates(high, chance, 1, 3).detail.endswith(
        "where all seeds of one are stable, so are 67% of the other's"
    )


def test_every_verdict_was_reached_above() -> None:
    reached = {
        exact(1, 1, 0).verdict,
        exact(1, 2, 0).verdict,
        signed(paired_difference(LOW, HIGH), -1).verdict,
        signed(paired_difference(LOW, NEAR), -1).verdict,
        signed(paired_difference(LOW, NEAR), 1).verdict,
        equal(LOW, NEAR, 0.01).verdict,
    }
    reached.add(signed(paired_difference(LOW, NEAR), -1, effect=-1).verdict)
    assert reached | {ABSENT, NOT_STATED} == set(VERDICTS)  # these two follow from a claim, test_claims.py
