import math

import numpy as np
import pytest

from stability_lab.data.tokens.scan import bigram_entropy, statistics


def test_closed_forms() -> None:
    """0 1 0 2 0 1 0 2 ...: half of the ids are 0; after a 0 comes 1 or 2, after those always 0."""
    ids = np.tile(np.array([0, 1, 0, 2], dtype=np.uint16), 250)
    found = statistics(np.split(ids, [10, 333]), sample=1000)
    assert found.unigram_entropy == pytest.approx(1.5 * math.log(2), abs=1e-12)
    # 999 pairs: 500 begin with 0, and 250 of them go on with 1.
    assert found.bigram_entropy == pytest.approx(500 / 999 * math.log(2), abs=1e-12)
    assert (found.tokens, found.smallest_id, found.largest_id, found.distinct) == (1000, 0, 2, 3)
    assert found.frequent == [(0, 500), (1, 250), (2, 250)]
    assert [(run.start, run.period, run.repeats) for run in found.runs] == [(0, 4, 250)]


def test_uniform_ids() -> None:
    ids = np.repeat(np.arange(100), 3)
    assert statistics([ids], 300).unigram_entropy == pytest.approx(math.log(100), abs=1e-12)


def test_bigrams_are_of_the_sample_and_counts_of_all() -> None:
    ids = np.concatenate([np.zeros(100, int), np.arange(100)])
    found = statistics(np.split(ids, 20), sample=55)
    assert (found.sampled, found.bigram_entropy, found.tokens) == (55, 0.0, 200)
    assert found.frequent[0] == (0, 101)


def test_independent_ids_have_equal_entropies() -> None:
    ids = np.random.default_rng(0).integers(0, 8, 200_000)
    assert bigram_entropy(ids) == pytest.approx(math.log(8), abs=1e-3)
    assert bigram_entropy(ids[:1]) == 0.0


@pytest.mark.parametrize(("ids", "message"), [([3, -1], "id -1 at offset 1"), ([2**40], "at offset 0")])
def test_ids_of_no_vocabulary(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistics([np.array(ids)], 10)


def test_nothing() -> None:
    with pytest.raises(ValueError, match="no id"):
        statistics([], 10)
