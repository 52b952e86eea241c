import numpy as np
import pytest

from stability_lab.data.loader import TrainSampler, validation_windows
from stability_lab.data.tokens.shards import Shards, as_tokens, windows_of

WHOLE = np.arange(1003, dtype=np.uint16)


def cut(*places: int) -> Shards:
    return Shards(np.split(WHOLE, places))


@pytest.mark.parametrize("shards", [cut(500), cut(3, 4, 5, 900), cut(1002)])
def test_shards_read_as_one_array(shards: Shards) -> None:
    assert len(shards) == 1003
    starts = np.arange(1003 - 11 + 1)
    windows = windows_of(shards, 11)
    assert len(windows) == len(starts)
    np.testing.assert_array_equal(windows[starts], windows_of(WHOLE, 11)[starts])


def test_samples_do_not_depend_on_how_the_ids_are_cut() -> None:
    one, many = TrainSampler(WHOLE, 10, 3), TrainSampler(cut(17, 333, 334), 10, 3)
    np.testing.assert_array_equal(one.batch(80, 40), many.batch(80, 40))
    np.testing.assert_array_equal(validation_windows(WHOLE, 10, 7), validation_windows(cut(17, 333), 10, 7))


@pytest.mark.parametrize(("start", "stop"), [(0, 1003), (0, 3), (2, 5), (4, 1000), (900, 1003), (7, 7)])
def test_slices(start: int, stop: int) -> None:
    piece = cut(3, 4, 900)[start:stop]
    parts = piece.parts if isinstance(piece, Shards) else [piece]
    np.testing.assert_array_equal(np.concatenate(parts), WHOLE[start:stop])


def test_a_single_part_stays_an_array_without_a_copy() -> None:
    assert as_tokens([WHOLE]) is WHOLE
    assert np.shares_memory(cut(500)[:200], WHOLE)
    assert cut(500).dtype == np.uint16


def test_positions_beyond_32_bits() -> None:
    """Two views of one number, each longer than 2^32, so nothing is held in memory."""
    long = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), shape=(2**32 + 5,), strides=(0,))
    shards = Shards([long, np.arange(10, dtype=np.uint16)])
    np.testing.assert_array_equal(windows_of(shards, 4)[np.array([2**32 + 3])], [[0, 0, 0, 1]])
