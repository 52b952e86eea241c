"""Main effects and interactions are those of a regression by statsmodels."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from stability_lab.compare.comparison import compare
from stability_lab.compare.factorial import effects
from stability_lab.compare.run_record import find_runs


def rows_of(seeds: int, noise: float = 0.02) -> list[tuple[frozenset[str], int, float]]:
    rng = np.random.default_rng(1)
    rows = []
    for seed, a, b in product(range(seeds), (0, 1), (0, 1)):
        loss = 2.0 + 0.3 * seed - 0.2 * a - 0.1 * b + 0.08 * a * b + noise * rng.normal()
        rows.append((frozenset([*["a"] * a, *["b"] * b]), seed, float(loss)))
    return rows


def test_without_noise_the_effects_are_those_of_the_formula() -> None:
    found, df = effects(rows_of(1, noise=0.0), ["a", "b"])
    assert [(e.name, round(e.value, 9)) for e in found] == [("a", -0.16), ("b", -0.06), ("a x b", 0.04)]
    assert df == 0
    assert all(e.low is None and e.p is None for e in found)


@pytest.mark.oracle
def test_effects_and_intervals_are_those_of_statsmodels() -> None:
    import pandas as pd
    from statsmodels.formula.api import ols

    rows = rows_of(4)
    found, df = effects(rows, ["a", "b"])
    table = pd.DataFrame(
        [
            {"loss": loss, "seed": seed, "a": 2.0 * ("a" in on) - 1, "b": 2.0 * ("b" in on) - 1}
            for on, seed, loss in rows
        ]
    )
    fit = ols("loss ~ a * b + C(seed)", table).fit()
    assert df == fit.df_resid == 9
    for effect, name in zip(found, ("a", "b", "a:b"), strict=True):
        assert effect.value == pytest.approx(2 * fit.params[name], rel=1e-9)
        assert (effect.low, effect.high) == pytest.approx(tuple(2 * fit.conf_int().loc[name]), rel=1e-9)
        assert effect.p == pytest.approx(fit.pvalues[name], rel=1e-6)


def test_a_design_with_a_hole_has_no_effects() -> None:
    with pytest.raises(ValueError, match="too few runs"):
        effects([row for row in rows_of(2) if row[0] != frozenset("ab")], ["a", "b"])


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
    assert [round(effect.value, 9) for effect in factorial.effects] == [-0.15, -0.05, 0.05]
    assert factorial.touched == {"softcap": 0.3, "qknorm+softcap": 0.002}
    assert (factorial.seeds, factorial.df) == (2, 3)


def test_diverged_runs_are_left_out_and_said(make_run, tmp_path: Path) -> None:
    for a, b in product((False, True), repeat=2):
        bad = {"status": "diverged", "verdict": "diverged"} if not (a or b) else {}
        make_run(f"r{a}{b}", [*["qknorm"] * a, *["softcap"] * b], loss=2.0, **bad)
    (factorial,) = compare(find_runs([tmp_path])[0]).factorials
    assert factorial.effects == ()
    assert factorial.reason == "too few runs to tell the effects apart: 1 runs diverged"
