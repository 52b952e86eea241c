from typing import cast

import numpy as np
import pytest

from stability_lab.config import ConfigError
from stability_lab.data.loader import RandomWindows, TrainSampler, batch_fingerprint, check_length, validation_windows
from stability_lab.data.source import TokenData

TOKENS = np.arange(1003, dtype=np.uint16)


@pytest.mark.parametrize(("micro_batch", "steps"), [(1, 24), (2, 12), (3, 8), (8, 3), (24, 1)])
def test_samples_do_not_depend_on_how_they_are_batched(micro_batch: int, steps: int) -> None:
    whole = TrainSampler(TOKENS, 10, data_seed=3).batch(90, 24)  # crosses the end of an epoch of 100
    parts = TrainSampler(TOKENS, 10, data_seed=3)
    split = np.concatenate([parts.batch(90 + step * micro_batch, micro_batch) for step in range(steps)])
    np.testing.assert_array_equal(split, whole)


def test_samples_do_not_depend_on_what_was_read_before() -> None:
    used = TrainSampler(TOKENS, 10, data_seed=3)
    for first in (0, 950, 340, 120, 730):
        used.batch(first, 16)
    for first in (95, 0, 512):
        np.testing.assert_array_equal(used.batch(first, 16), TrainSampler(TOKENS, 10, data_seed=3).batch(first, 16))


def test_batch_holds_the_windows_at_starts() -> None:
    sampler = TrainSampler(TOKENS, 10, data_seed=0)
    starts, batch = sampler.starts(95, 12), sampler.batch(95, 12)
    assert (starts.dtype, starts.shape, batch.dtype, batch.shape) == (np.int64, (12,), np.int64, (12, 11))
    np.testing.assert_array_equal(batch, starts[:, None] + np.arange(11))  # TOKENS[i] is i


@pytest.mark.parametrize(("length", "seq_len", "n"), [(1003, 10, 100), (1001, 10, 100), (1000, 10, 99), (11, 10, 1)])
def test_an_epoch_is_a_permutation_of_all_windows(length: int, seq_len: int, n: int) -> None:
    sampler = TrainSampler(np.arange(length), seq_len, data_seed=5)
    assert sampler.n_windows == n
    for epoch in range(3):
        starts = sampler.starts(epoch * n, n)
        np.testing.assert_array_equal(np.sort(starts), np.arange(n) * seq_len)


def test_seeds_and_epochs_differ() -> None:
    orders = [
        tuple(TrainSampler(TOKENS, 10, seed).starts(epoch * 100, 100)) for seed in (0, 1, -1) for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)


def test_the_order_is_pinned() -> None:
    """Another order would break comparisons with earlier runs: a numpy that changes it must be noticed."""
    assert batch_fingerprint(TrainSampler(TOKENS, 10, data_seed=0).batch(0, 200)) == "c3393bbc8d00c78f"


def test_permutations_of_old_epochs_are_dropped() -> None:
    sampler = TrainSampler(TOKENS, 10, data_seed=0)
    for first in range(0, 5000, 30):
        sampler.starts(first, 30)
        assert len(sampler._permutations) <= 2


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    sampler = TrainSampler(np.arange(31), 10, data_seed=0)
    starts = sampler.starts(1, 11)
    assert sampler.n_windows == 3
    np.testing.assert_array_equal(np.bincount(starts[2:] // 10), [3, 3, 3])


def test_tokens_are_not_copied() -> None:
    tokens = np.arange(1003, dtype=np.uint16)
    assert np.shares_memory(TrainSampler(tokens, 10, data_seed=0)._windows, tokens)


@pytest.mark.parametrize("n", [1, 2, 7, 99, 100, 101, 10_000])
@pytest.mark.parametrize("length", [1001, 1003, 1009])
def test_validation_windows_span_the_whole_set(length: int, n: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    windows = validation_windows(tokens, 10, n)
    assert windows.dtype == np.int64
    assert windows.shape == (min(n, 100), 11)
    np.testing.assert_array_equal(windows - windows[:, :1], np.tile(np.arange(11), (len(windows), 1)))
    assert windows[0, 0] == 0
    gaps = np.diff(windows[:, 0])
    if len(windows) > 1:
        assert windows[-1, -1] == length - 1
        assert gaps.min() >= 10  # no target is scored twice
        assert np.ptp(gaps) <= 1  # evenly strided


def _token_data(train: int, val: int) -> TokenData:
    arrays = [cast(np.memmap, np.zeros(n, dtype=np.uint16)) for n in (train, val)]
    return TokenData(
        train=arrays[0],
        val=arrays[1],
        vocab_size=257,
        eos_id=256,
        val_bytes=val,
        unigram_entropy=0.0,
        corpus={},
        fingerprint="",
    )


@pytest.mark.parametrize(
    ("train", "val", "split", "longest"),
    [
        (500, 100, "validation", 99),
        (100, 500, "training", 99),
        (100, 50, "validation", 49),  # both are too short, and validation limits
        (50, 100, "training", 49),
        (60, 60, "training", 59),
    ],
)
def test_context_longer_than_the_data(train: int, val: int, split: str, longest: int) -> None:
    data = _token_data(train, val)
    check_length(data, longest)
    message = rf"model\.seq_len=100: the {split} split .* fits this data is {longest}\."
    with pytest.raises(ConfigError, match=message):
        check_length(data, 100)


def test_batch_fingerprint_is_of_the_ids() -> None:
    batch = TrainSampler(TOKENS, 10, data_seed=0).batch(0, 4)
    assert len(batch_fingerprint(batch)) == 16
    assert batch_fingerprint(batch) == batch_fingerprint(batch.astype(np.uint16))
    assert batch_fingerprint(batch) != batch_fingerprint(batch[::-1])


def test_random_windows_are_a_function_of_seed_and_number() -> None:
    whole = RandomWindows(TOKENS, 10, data_seed=3).batch(90, 24)
    parts = RandomWindows(TOKENS, 10, data_seed=3)
    np.testing.assert_array_equal(np.concatenate([parts.batch(i, 1) for i in range(90, 114)]), whole)
    np.testing.assert_array_equal(whole - whole[:, :1], np.tile(np.arange(11), (24, 1)))  # TOKENS[i] is i
    assert not np.array_equal(RandomWindows(TOKENS, 10, data_seed=4).batch(90, 24), whole)


def test_random_windows_start_anywhere_and_equally_often() -> None:
    starts = RandomWindows(TOKENS, 10, data_seed=0).starts(0, 993 * 400)
    counts = np.bincount(starts, minlength=993)
    assert len(counts) == 993
    # Chi-squared with 992 degrees of freedom has standard deviation sqrt(2 * 992).
    assert abs(((counts - 400) ** 2 / 400).sum() - 992) < 4 * np.sqrt(2 * 992)
    assert len(np.unique(RandomWindows(TOKENS, 10, data_seed=0).starts(0, 500))) < 500  # with replacement


def test_random_window_fingerprint_is_stable() -> None:
    assert batch_fingerprint(RandomWindows(TOKENS, 10, data_seed=0).batch(0, 200)) == "9f0f094196f54e0f"
