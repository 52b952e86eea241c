"""Main effects and interactions are contrasts of all combinations of the stabilizers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from stability_lab.compare.comparison import compare
from stability_lab.compare.factorial import Factorial
from stability_lab.compare.run_record import find_runs

NAMES = {"a": "qknorm", "b": "softcap"}


def factorial_of(make_run, path: Path, losses: dict[str, list[float]]) -> Factorial:
    """`losses` by seed, of the arms "", "a", "b" and "ab"."""
    for arm, values in losses.items():
        for seed, loss in enumerate(values):
            make_run(f"r{arm}{seed}", [NAMES[factor] for factor in arm], seed=seed, loss=loss)
    (factorial,) = compare(find_runs([path])[0]).factorials
    return factorial


def with_noise(seeds: int, noise: float) -> dict[str, list[float]]:
    rng, by_seed = np.random.default_rng(1), 0.3 * np.arange(seeds)
    means = {"": 2.0, "a": 1.8, "b": 1.9, "ab": 1.78}
    return {arm: (mean + by_seed + noise * rng.normal(size=seeds)).tolist() for arm, mean in means.items()}


def test_without_noise_the_effects_are_those_of_the_formula(make_run, tmp_path: Path) -> None:
    found = factorial_of(make_run, tmp_path, with_noise(1, noise=0.0)).effects
    values = [(effect.name, round(effect.difference.value, 9)) for effect in found]
    assert values == [("qknorm", -0.16), ("softcap", -0.06), ("qknorm x softcap", 0.04)]
    assert all(effect.difference.p is None for effect in found)


@pytest.mark.oracle
def test_effects_are_scipys_tests_of_the_contrast_of_each_seed(make_run, tmp_path: Path) -> None:
    losses = with_noise(4, noise=0.02)
    none, a, b, both = (np.array(losses[arm]) for arm in ("", "a", "b", "ab"))
    contrasts = ((a + both - none - b) / 2, (b + both - none - a) / 2, (none + both - a - b) / 2)
    factorial = factorial_of(make_run, tmp_path, losses)
    ps = [effect.difference.p_holm for effect in factorial.effects]
    assert ps[0] == pytest.approx(6 * min(effect.difference.p or 1 for effect in factorial.effects))
    for effect, contrast in zip(factorial.effects, contrasts, strict=True):
        expected: Any = stats.ttest_1samp(contrast, 0.0)
        assert effect.difference.value == pytest.approx(contrast.mean(), rel=1e-9)
        assert effect.difference.p == pytest.approx(expected.pvalue, rel=1e-6)
        assert effect.difference.tests == 6  # with the three differences to the baseline


@pytest.mark.oracle
def test_the_estimates_are_those_of_a_regression_in_statsmodels(make_run, tmp_path: Path) -> None:
    import pandas as pd
    from statsmodels.formula.api import ols

    losses = with_noise(3, noise=0.02)
    rows = [
        {"loss": loss, "seed": seed, "a": 2.0 * ("a" in arm) - 1, "b": 2.0 * ("b" in arm) - 1}
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    fit = ols("loss ~ a * b + C(seed)", pd.DataFrame(rows)).fit()
    found = factorial_of(make_run, tmp_path, losses).effects
    expected = [2 * fit.params[name] for name in ("a", "b", "a:b")]
    assert [effect.difference.value for effect in found] == pytest.approx(expected)


def test_a_design_with_a_hole_has_no_effects(make_run, tmp_path: Path) -> None:
    for arm, values in with_noise(2, noise=0.0).items():
        for seed, loss in enumerate(values):
            bad = {"status": "diverged"} if arm == "ab" else {}
            make_run(f"r{arm}{seed}", [NAMES[factor] for factor in arm], seed=seed, loss=loss, **bad)
    (factorial,) = compare(find_runs([tmp_path])[0]).factorials
    assert factorial.effects == ()
    assert factorial.reason == "too few runs to tell the effects apart: 2 runs diverged"


def test_the_largest_full_combination_of_arms_is_found(make_run, tmp_path: Path) -> None:
    for seed in range(2):
        for a, b in product((False, True), repeat=2):
            names = [*["qknorm"] * a, *["softcap"] * b]
            final = {"attn/score_mod/share/touched": 0.002 if a else 0.3} if b else {}
            make_run(
                "".join(names) + str(seed), names, seed=seed, loss=2 - 0.2 * a - 0.1 * b + 0.1 * a * b, final=final
            )
        make_run(f"zloss{seed}", ["zloss"], seed=seed, loss=2.0)
    (factorial,) = compare(find_runs([tmp_path])[0]).factorials
    assert factorial.factors == ("qknorm", "softcap")
    assert [round(effect.difference.value, 9) for effect in factorial.effects] == [-0.15, -0.05, 0.05]
    assert factorial.touched == {"softcap": 0.3, "qknorm+softcap": 0.002}


def test_diverged_runs_are_left_out_and_said(make_run, tmp_path: Path) -> None:
    for seed, a, b in product(range(3), (0, 1), (0, 1)):
        bad = {"status": "diverged", "verdict": "diverged"} if seed == 2 and a and b else {}
        make_run(f"r{seed}{a}{b}", [*["qknorm"] * a, *["softcap"] * b], seed=seed, loss=2.0 - 0.1 * a, **bad)
    (factorial,) = compare(find_runs([tmp_path])[0]).factorials
    assert factorial.reason == "1 diverged runs are left out"
    assert [effect.difference.n for effect in factorial.effects] == [2, 2, 2]
