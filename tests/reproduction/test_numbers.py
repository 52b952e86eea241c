"""Each number of the textbook against a formula of its own, in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stability_lab.reproduction.catalogue import claims
from stability_lab.reproduction.numbers import DRAWS, KEYS, Value, numbers


@pytest.fixture(scope="module")
def found() -> dict[str, Value]:
    return numbers()


def log_z(logits: list[float]) -> float:
    return math.log(sum(map(math.exp, logits)))


def tanh_cap(cap: float, x: float) -> float:
    return cap * (math.exp(2 * x / cap) - 1) / (math.exp(2 * x / cap) + 1)


SINGLE = {
    "logz_10_5_0": log_z([10, 5, 0]),
    "logz_2_1_0": log_z([2, 1, 0]),
    "zloss_10_5_0": 1e-4 * log_z([10, 5, 0]) ** 2,
    "zloss_2_1_0": 1e-4 * log_z([2, 1, 0]) ** 2,
    "zloss_slope_above": 2e-4 * 5,
    "zloss_slope_below": -2e-4 * 5,
    "raw_logit": 10 * 5 + 20 * 10 + 30 * 15 + 40 * 20,
    "raw_logit_scaled": 750,
    "qknorm_layer_logit": 4,
    "qknorm_layer_scaled": 2,
    "qknorm_norms_differ": 0,
    "cap30_100": tanh_cap(30, 100),
    "cap30_50": tanh_cap(30, 50),
    "cap30_10": tanh_cap(30, 10),
    "divisor_head_dim_3": math.sqrt(3),
    "rmsnorm_radius_64": 8,
    "layernorm_radius_64": 8,
    "layernorm_mean_64": 0,
    "rmsnorm_rank_8": 7,
    "layernorm_rank_8": 6,
    "layernorm_span_8": 7,
    "layernorm_points_2": 2,
    "layernorm_rank_2": 0,
    "position_0_largest": 1,
    "caps_taken": 0,
    "positions_largest": 1,
    "l2_radius_64": 1,
    "l2_points_of_lengths": 1,
    "rms_points_of_lengths": 1,
    "noise_in_length": 0,
    "learned_factor_start": 1,
    "learned_factor_moves": 1,
    "naive_softmax_fails": 1,
    "softmax_fails": 0,
}
DRAWN = {
    "variance_over_head_dim",
    "entropy_factor_2",
    "entropy_factor_half",
    *("sharpest_head_scaled", "sharpest_head_unscaled", "gradient_factor_1", "gradient_factor_tenth"),
    *("noise_after_rmsnorm", "noise_before_half"),
    *("positions_shift_error", "masked_share"),
    *(f"gradient_{name}_{d}" for name in ("scaled", "unscaled") for d in (64, 1024)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_a_number_is_that_of_its_formula(name: str, found: dict[str, Value]) -> None:
    assert found[name] == pytest.approx(SINGLE[name], rel=3e-8, abs=1e-12)


@pytest.mark.slow
def test_all_that_is_computed_is_tested_and_claimed(found: dict[str, Value]) -> None:
    assert set(found) == SINGLE.keys() | DRAWN
    tests = [claim.test for claim in claims() if claim.parts == ("numbers",)]
    assert {
        test[key] for test in tests for key in ("value", "a", "b") if key in test and test["kind"] != "printed"
    } == set(found)


@pytest.mark.slow
def test_what_is_said_of_encoders(found: dict[str, Value]) -> None:
    error, share = found["positions_shift_error"], found["masked_share"]
    assert isinstance(error, float)
    assert 0 < error < 3e-7  # of a table in fp32
    assert isinstance(share, float)
    assert abs(share - 0.15) < 5 * math.sqrt(0.15 * 0.85 / 1.26e6)


@pytest.mark.slow
def test_the_variance_of_a_dot_product_is_the_number_of_its_terms(found: dict[str, Value]) -> None:
    ratio = found["variance_over_head_dim"]
    assert isinstance(ratio, float)
    # Kurtosis 3 + 6/d gives the variance of a sample variance; 4 is the smallest d.
    assert abs(ratio - 1) < 5 * math.sqrt((2 + 6 / 4) / 200_000)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 1024])
@pytest.mark.parametrize("name", ["scaled", "unscaled"])
def test_the_gradient_through_a_softmax_is_that_of_its_jacobian(name: str, d: int, found: dict[str, Value]) -> None:
    """|diag(p) - p p^T|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2, over other draws of the same distribution."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((4 * DRAWS, d)), rng.standard_normal((4 * DRAWS, KEYS, d))
    z = np.einsum("nd,nkd->nk", q, k) / (math.sqrt(d) if name == "scaled" else 1)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    square = (p**2).sum(1)
    norms = np.sqrt(np.maximum(square - 2 * (p**3).sum(1) + square**2, 0))
    values = found[f"gradient_{name}_{d}"]
    assert isinstance(values, list)
    error = norms.std() / math.sqrt(len(norms)) + np.std(values) / math.sqrt(len(values))
    assert np.mean(values) == pytest.approx(norms.mean(), abs=5 * error)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("entropy_factor_2", 2.0), ("entropy_factor_half", 0.5)])
def test_entropy_is_that_of_a_naive_softmax(name: str, factor: float, found: dict[str, Value]) -> None:
    rng = np.random.default_rng(1)
    entropies = []
    for _ in range(64):
        q, k = rng.standard_normal((64, 32)), rng.standard_normal((64, 32))
        z = factor * q @ k.T / math.sqrt(32)
        for t in range(1, 64):
            p = np.exp(z[t, : t + 1])
            p /= p.sum()
            entropies.append(-(p * np.log(p)).sum() / math.log(t + 1))
    values = found[name]
    assert isinstance(values, list)
    assert np.mean(values) == pytest.approx(np.mean(entropies), abs=0.02)


@pytest.mark.slow
def test_what_is_drawn_for_heads_factors_and_noise(found: dict[str, Value]) -> None:
    """Over other draws; noise of a tenth keeps 63 of its 64 directions."""
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((200, 8, 32, 64)), rng.standard_normal((200, 8, KEYS, 64))
    z = rng.standard_normal((4 * DRAWS, KEYS))
    expected = {"noise_after_rmsnorm": 0.1 * math.sqrt(63 / 64), "noise_before_half": 0.05}
    for name, divisor in (("scaled", 8.0), ("unscaled", 1.0)):
        largest = _softmax(q @ k.swapaxes(-1, -2) / divisor).max(-1)
        expected[f"sharpest_head_{name}"] = largest.mean(-1).max(-1).mean()
    for name, factor in (("1", 1.0), ("tenth", 0.1)):
        p = _softmax(factor * z)
        square = (p**2).sum(1)
        expected[f"gradient_factor_{name}"] = factor * np.sqrt(square - 2 * (p**3).sum(1) + square**2).mean()
    for name, value in expected.items():
        values = found[name]
        assert isinstance(values, list)
        assert np.mean(values) == pytest.approx(value, rel=0.03), name


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)
