import numpy as np
import pytest

from stability_lab.data.repeats import LONGEST, REPEATS, Repetition, repeated_runs, repetitive


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1000, 50_000, n)


def with_run(period: int, repeats: int, extra: int = 0) -> np.ndarray:
    """Noise, `repeats` copies of `period` different ids and the first `extra` of them again, noise."""
    gram = np.arange(period)
    return np.concatenate([noise(50), np.tile(gram, repeats), gram[:extra], noise(50, 1)])


def obvious(ids: list[int]) -> bool:
    """Every n-gram at every place, compared with what follows."""
    for n in range(1, LONGEST + 1):
        for start in range(len(ids) - n * REPEATS + 1):
            if ids[start : start + n] * REPEATS == ids[start : start + n * REPEATS]:
                return True
    return False


@pytest.mark.parametrize("period", [1, 2, 5, 13])
def test_exactly_32_repeats_count(period: int) -> None:
    assert repetitive(with_run(period, 32)[None])[0]
    assert not repetitive(with_run(period, 31, extra=period - 1)[None])[0]
    assert repeated_runs(with_run(period, 32)) == [Repetition(50, period, 32)]
    assert repeated_runs(with_run(period, 31, extra=period - 1)) == []


def test_longer_ngrams_do_not_count() -> None:
    assert not repetitive(with_run(14, 40)[None])[0]


def test_rows_are_told_apart() -> None:
    rows = np.stack([noise(150), with_run(1, 50), with_run(2, 25), noise(150, 2)])
    np.testing.assert_array_equal(repetitive(rows), [False, True, False, False])


def test_agrees_with_the_obvious_way() -> None:
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(200):
        period, repeats = rng.integers(1, 15), rng.integers(28, 36)
        gram = rng.integers(0, 3, period)
        row = np.concatenate([rng.integers(0, 3, rng.integers(0, 9)), np.tile(gram, repeats), rng.integers(0, 3, 5)])
        expected = obvious(row.tolist())
        seen.add(expected)
        assert repetitive(row[None])[0] == expected
        assert bool(repeated_runs(row)) == expected
    assert seen == {True, False}


def test_short_rows() -> None:
    assert not repetitive(np.zeros((3, 31), dtype=int)).any()
    assert repetitive(np.zeros((3, 32), dtype=int)).all()
    assert repeated_runs(np.zeros(0, dtype=int)) == []


def test_a_run_is_reported_once() -> None:
    assert repeated_runs(np.zeros(1000, dtype=int)) == [Repetition(0, 1, 1000)]
