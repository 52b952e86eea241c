import time
import warnings

import numpy as np
import pytest

from stability_lab.judge.spikes import flag_spikes, spike_score

NAN, INF = float("nan"), float("inf")


def reference_flags(x, window, threshold, two_sided=False):
    """The rule as a plain loop: (spike, scored) for each value."""
    finite, flags, scored = [], [], []
    for value in x:
        past = finite[-window:]
        full = len(past) == window
        spike = False
        if full:
            mean = sum(past) / window
            std = (sum((p - mean) ** 2 for p in past) / window) ** 0.5
            if not np.isfinite(value):
                spike = True
            elif std >= 1e-10:
                spike = value > mean + threshold * std or (two_sided and value < mean - threshold * std)
        flags.append(spike)
        scored.append(full)
        if np.isfinite(value):
            finite.append(value)
    return np.array(flags, dtype=bool), np.array(scored, dtype=bool)


def noisy(n=700, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(3.0, 0.2, n)
    x[rng.integers(0, n, 12)] += 5.0
    x[rng.integers(0, n, 6)] -= 5.0
    x[rng.integers(0, n, 9)] = [NAN, INF, -INF] * 3
    return x


@pytest.mark.parametrize(("last", "spike"), [(8.0, False), (8.001, True)])
def test_threshold_is_strict(last, spike):
    result = spike_score([1.0, 3.0] * 64 + [last])  # mean 2, population deviation 1
    assert (result.n_spikes, result.n_scored) == (int(spike), 1)
    assert result.score == 100.0 * spike
    assert result.resolution == 100.0
    assert result.indices.tolist() == [128] * spike


def test_below_the_mean_counts_only_two_sided():
    x = [1.0, 3.0] * 64 + [-4.001]
    assert spike_score(x).n_spikes == 0
    assert spike_score(x, two_sided=True).n_spikes == 1
    assert spike_score([*x[:-1], -4.0], two_sided=True).n_spikes == 0


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize(("window", "threshold"), [(128, 6.0), (16, 3.0), (2, 1.5)])
def test_equals_the_plain_loop(window, threshold, two_sided):
    x = noisy()
    flags, scored = reference_flags(x, window, threshold, two_sided)
    result = spike_score(x, window=window, threshold=threshold, two_sided=two_sided)
    assert flags.any()
    assert result.indices.tolist() == np.flatnonzero(flags).tolist()
    assert (result.n_spikes, result.n_scored) == (flags.sum(), scored.sum())
    assert result.score == pytest.approx(100.0 * flags.sum() / scored.sum())
    assert result.n_nonfinite == np.count_nonzero(~np.isfinite(x))


@pytest.mark.parametrize("flush", [1, 7, 100])
def test_flush_by_flush_equals_the_whole(flush):
    x = noisy(400)
    parts = [flag_spikes(x[: i + flush], window=32, start=i) for i in range(0, x.size, flush)]
    whole = flag_spikes(x, window=32)
    assert whole.any()
    assert np.concatenate(parts).tolist() == whole.tolist()


@pytest.mark.parametrize("n", [0, 1, 127, 128])
def test_short_run_has_no_score_but_a_reason(n):
    result = spike_score(np.ones(n))
    assert result.score is None
    assert result.resolution is None
    assert (result.n_spikes, result.n_scored) == (0, 0)
    assert result.reason is not None
    assert "128" in result.reason
    assert f"{n} values" in result.reason


def test_defined_score_has_no_reason():
    result = spike_score(np.ones(129))
    assert (result.score, result.n_scored, result.reason) == (0.0, 1, None)


def test_early_nonfinite_value_is_counted_but_not_scored():
    result = spike_score([NAN] + [1.0, 3.0] * 64)
    assert (result.n_nonfinite, result.n_scored, result.n_spikes, result.score) == (1, 0, 0, None)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_value_is_a_spike_and_enters_no_window(value):
    x = [1.0, 3.0] * 64 + [value, 8.001, 2.0]
    result = spike_score(x)
    assert result.indices.tolist() == [128, 129]
    assert (result.n_scored, result.n_nonfinite) == (3, 1)


def test_all_nonfinite_is_undefined():
    result = spike_score([NAN] * 300)
    assert result.score is None
    assert result.n_nonfinite == 300


def test_flat_window_has_no_finite_spike_but_a_nonfinite_one():
    assert spike_score([2.0] * 128 + [50.0]).n_spikes == 0
    assert spike_score([2.0] * 128 + [NAN]).n_spikes == 1


def test_current_value_is_not_in_its_window():
    # With itself in the window no value is further away than sqrt(window - 1) deviations, here 1.7.
    assert spike_score([1.0, 3.0, 1.0, 3.0, 9.0], window=4).n_spikes == 1


def test_a_spike_masks_a_later_one():
    x = [1.0, 3.0] * 64 + [100.0, 20.0]
    assert spike_score(x).indices.tolist() == [128]


def test_no_cancellation_on_a_large_offset():
    x = np.array([1.0, 3.0] * 64 + [8.001]) + 1e9
    assert spike_score(x).n_spikes == 1
    x[-1] = 8.0 + 1e9
    assert spike_score(x).n_spikes == 0


def test_huge_values_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spike_score([1e300, 3e300] * 64 + [1e308]).n_spikes == 0


def test_hundred_thousand_values_take_less_than_a_second_of_cpu():
    x = np.random.default_rng(0).normal(size=100_000)
    began = time.process_time()
    result = spike_score(x)
    assert time.process_time() - began < 1.0
    assert result.n_scored == 100_000 - 128


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones((3, 3)), {}, "shape"),
        (np.ones(3), {"window": 1}, "window is 1"),
        (np.ones(3), {"threshold": 0.0}, "threshold is 0.0"),
        (np.ones(3), {"threshold": NAN}, "threshold is nan"),
    ],
)
def test_bad_input(x, options, message):
    with pytest.raises(ValueError, match=message):
        spike_score(x, **options)


def test_bad_start():
    with pytest.raises(ValueError, match="start is -1"):
        flag_spikes(np.ones(3), start=-1)
