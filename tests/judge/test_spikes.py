import math
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

from stability_lab.judge import spikes
from stability_lab.judge.spikes import (
    DEFINITIONS,
    Definition,
    flag_spikes,
    needed_steps,
    rolling_median,
    spike_score,
    spike_scores,
    trailing_level,
)

NAN, INF = float("nan"), float("inf")


def interval(x, definition=DEFINITIONS["olmo_core"], **options):
    found = spike_score(x, definition, **options).interval
    assert found is not None
    return found


def olmo_core(**changes):
    return replace(DEFINITIONS["olmo_core"], **changes)


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
    assert spike_score(x, olmo_core(two_sided=True)).n_spikes == 1
    assert spike_score([*x[:-1], -4.0], olmo_core(two_sided=True)).n_spikes == 0


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize(("window", "threshold"), [(128, 6.0), (16, 3.0), (2, 1.5)])
def test_equals_the_plain_loop(window, threshold, two_sided):
    x = noisy()
    flags, scored = reference_flags(x, window, threshold, two_sided)
    result = spike_score(x, olmo_core(window=window, threshold=threshold, two_sided=two_sided))
    assert flags.any()
    assert result.indices.tolist() == np.flatnonzero(flags).tolist()
    assert (result.n_spikes, result.n_scored) == (flags.sum(), scored.sum())
    assert result.score == pytest.approx(100.0 * flags.sum() / scored.sum())
    assert result.n_nonfinite == np.count_nonzero(~np.isfinite(x))


@pytest.mark.parametrize(
    "distort",
    [
        lambda x, at: 3 + 0.02 * x,
        lambda x, at: np.round(3 + 0.02 * x, 2),
        lambda x, at: 10 * np.exp(-np.arange(x.size) / 200) + 2 + 1e-3 * x,
        lambda x, at: np.where(at < 0.001, 1e150, np.where(at < 0.002, -1e100, x)),
        lambda x, at: np.where(at < 0.05, NAN, np.exp(3 * x)),
        lambda x, at: 1e8 + 1e-6 * x,
        lambda x, at: np.where(at < 0.01, x, 2.0),
        lambda x, at: np.cumsum(x),
    ],
)
@pytest.mark.parametrize("name", ["olmo2", "olmo_core", "llm_c"])
def test_running_sums_leave_out_no_spike(name, distort, monkeypatch):
    rng = np.random.default_rng(0)
    x = distort(rng.standard_normal(10_000), rng.random(10_000))
    rules = [DEFINITIONS[name], replace(DEFINITIONS[name], window=16, min_window=16, threshold=2.0)]
    found = [flag_spikes(x, rule, start=start) for rule in rules for start in (0, 4_321)]
    monkeypatch.setattr(spikes, "_may_be_outside", lambda values, *_: np.ones(values.size, dtype=bool))
    every = [flag_spikes(x, rule, start=start) for rule in rules for start in (0, 4_321)]
    assert [flags.tolist() for flags in found] == [flags.tolist() for flags in every]


@pytest.mark.parametrize("flush", [1, 7, 100])
@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_flush_by_flush_equals_the_whole(name, flush):
    definition = DEFINITIONS[name]
    definition = replace(definition, window=32, min_window=min(32, definition.min_window), threshold=4.0)
    x = noisy(400)
    parts = [flag_spikes(x[: i + flush], definition, start=i) for i in range(0, x.size, flush)]
    whole = flag_spikes(x, definition)
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
    assert spike_score([1.0, 3.0, 1.0, 3.0, 9.0], olmo_core(window=4)).n_spikes == 1


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


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_hundred_thousand_values_take_less_than_a_second_of_cpu(name):
    x = np.random.default_rng(0).normal(size=100_000)
    began = time.process_time()
    result = spike_score(x, DEFINITIONS[name])
    assert time.process_time() - began < 1.0
    assert result.n_scored == 100_000 - DEFINITIONS[name].needs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 1}, "window is 1"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"threshold": NAN}, "threshold is nan"),
        ({"needs_full_window": False, "min_window": 1}, "min_window is 1"),
        ({"needs_full_window": False, "min_window": 129}, "min_window is 129"),
    ],
)
def test_bad_definition(changes, message):
    with pytest.raises(ValueError, match=message):
        olmo_core(**changes)


def test_bad_series():
    with pytest.raises(ValueError, match="shape"):
        spike_score(np.ones((3, 3)))
    with pytest.raises(ValueError, match="start is -1"):
        flag_spikes(np.ones(3), start=-1)


def literal_olmo_core(values):
    """The monitor of OLMo-core, step by step, with lists."""
    history, spikes = [], []
    for value in values:
        spike = False
        if len(history) == 128:
            mean = sum(history) / 128
            std = math.sqrt(sum((h - mean) ** 2 for h in history) / 128)
            spike = std >= 1e-10 and value > mean + 6 * std
        spikes.append(spike)
        history = [*history, value][-128:]
    return spikes


def test_olmo_core_equals_its_own_rule_on_finite_data():
    rng = np.random.default_rng(5)
    x = rng.lognormal(0, 0.3, 1500)
    x[rng.integers(0, 1500, 40)] *= 20
    x[700:900] = 1.25  # a flat stretch, and the jump out of it that the rule ignores
    expected = literal_olmo_core(x.tolist())
    assert sum(expected) > 3
    assert flag_spikes(x, DEFINITIONS["olmo_core"]).tolist() == expected


def test_olmo2_is_two_sided_at_least_and_sees_a_jump_out_of_a_flat_window():
    olmo2 = DEFINITIONS["olmo2"]
    window = [1.0, 3.0] * 500  # mean 2, deviation 1
    for last, spike in ((9.0, 1), (8.999, 0), (-5.0, 1), (-4.999, 0)):
        assert spike_score([*window, last], olmo2).n_spikes == spike
    assert spike_score([0.1] * 1000 + [0.1 + 1e-9], olmo2).n_spikes == 1
    assert spike_score([0.1] * 1500, olmo2).n_spikes == 0  # rounding is no jump
    assert spike_score([1e6] * 1000 + [1e6 + 1e-7], olmo2).n_spikes == 0


def test_a_spike_masks_a_later_one_for_olmo2_but_not_for_the_robust_rule():
    x = np.random.default_rng(0).normal(size=3000)
    x[1500], x[1550] = 100.0, 12.0
    scores = spike_scores(x)
    assert scores["olmo2"].indices.tolist() == [1500]
    assert scores["robust"].indices.tolist() == [1500, 1550]
    assert scores["olmo2"].score == 100.0 / 2000
    assert (scores["robust"].n_scored, scores["robust"].min_window) == (2980, 20)


def test_five_hundred_rows_have_no_olmo2_score():
    scores = spike_scores(np.random.default_rng(0).normal(size=500))
    assert (scores["olmo2"].score, scores["olmo2"].interval, scores["olmo2"].n_scored) == (None, None, 0)
    assert "1000" in str(scores["olmo2"].reason)
    assert "500 values" in str(scores["olmo2"].reason)
    assert scores["olmo2"].as_dict()["n_spikes"] is None
    assert scores["olmo_core"].score == 0.0


def test_llm_c_has_the_value_inside_its_window_and_a_ceiling():
    llm_c = DEFINITIONS["llm_c"]
    assert llm_c.ceiling == pytest.approx(math.sqrt(127))
    x = noisy(600)
    finite, flags = [], []
    for value in x:
        window = np.array([*finite[-127:], value])
        full = len(finite) >= 128
        flags.append(bool(full and (not np.isfinite(value) or (value - window.mean()) / window.std() > 7)))
        finite += [value] if np.isfinite(value) else []
    assert any(flags)
    assert flag_spikes(x, llm_c).tolist() == flags
    assert spike_score(x, llm_c).ceiling == llm_c.ceiling
    with pytest.raises(ValueError, match=r"11\.27 deviations"):
        replace(llm_c, threshold=math.sqrt(127))
    with pytest.raises(ValueError, match="inside its window of 50"):
        replace(llm_c, window=50)


def test_robust_equals_median_and_mad_over_a_shrinking_window():
    x = noisy(500, seed=3)
    x[200:330] = np.round(x[200:330])  # more than half of the values equal: mean absolute deviation
    finite, flags = [], []
    for value in x:
        spike = False
        if len(finite) >= 20:
            window = np.array(finite[-64:])
            median = np.median(window)
            scale = 1.4826 * np.median(np.abs(window - median)) or 1.2533 * np.mean(np.abs(window - median))
            spike = not np.isfinite(value) or value - median > 7 * scale
        flags.append(bool(spike))
        finite += [value] if np.isfinite(value) else []
    assert sum(flags) > 10
    assert flag_spikes(x, DEFINITIONS["robust"]).tolist() == flags


def test_short_run_with_two_spikes_and_a_nan():
    x = np.random.default_rng(1).normal(1.0, 0.1, 100)
    x[30], x[35], x[60] = 50.0, NAN, 50.0
    robust = spike_score(x, DEFINITIONS["robust"])
    assert robust.indices.tolist() == [30, 35, 60]
    assert (robust.n_nonfinite, robust.n_scored) == (1, 80)
    assert spike_score(x).score is None


def test_robust_is_quiet_on_noise_falls_and_straight_rises():
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(20, 300))
    assert sum(spike_score(row, DEFINITIONS["robust"]).n_spikes for row in noise) <= 1
    fall = 2 + 3 * np.exp(-np.arange(300) / 40) + 0.02 * rng.normal(size=300)
    assert spike_score(fall, DEFINITIONS["robust"]).n_spikes == 0
    rise = np.linspace(2.0, 3.6, 2000) + 0.01 * rng.normal(size=2000)
    assert all(score.n_spikes == 0 for score in spike_scores(rise).values())


def test_medians():
    x = np.array([3.0, NAN, 1.0, 2.0, 5.0])
    medians, deviations = trailing_level(x, [0, 1, 2, 4], window=2)
    assert medians.tolist()[1:] == [3.0, 3.0, 1.5]
    assert np.isnan([medians[0], deviations[0]]).all()
    assert deviations[3] == pytest.approx(1.4826 * 0.5)
    y = np.random.default_rng(0).normal(size=60)
    assert rolling_median(y, 7, 3).tolist() == [np.median(y[i : i + 7]) for i in range(0, 54, 3)]
    assert rolling_median(y, 61).size == 0


def test_interval_contains_the_score_and_repeats():
    x = np.random.default_rng(0).normal(size=5000)
    x[np.arange(200, 5000, 200)] += 50
    score = spike_score(x, DEFINITIONS["robust"])
    low, high = interval(x, DEFINITIONS["robust"])
    assert score.score is not None
    # 24 events in independent blocks: Poisson, so about +- 2 sqrt(24).
    assert low < score.score < high
    assert 100 * 12 / 4980 < low < 100 * 18 / 4980
    assert 100 * 30 / 4980 < high < 100 * 36 / 4980
    assert interval(x, DEFINITIONS["robust"]) == score.interval
    assert interval(x, DEFINITIONS["robust"], seed=1) != score.interval


def test_interval_is_wider_where_spikes_cluster():
    apart, together = np.random.default_rng(0).normal(size=(2, 5000))
    apart[np.arange(300, 4800, 75)] += 50
    together[(np.arange(300, 4800, 750)[:, None] + np.arange(10)).ravel()] += 50
    (a_low, a_high), (t_low, t_high) = (interval(x, DEFINITIONS["robust"]) for x in (apart, together))
    assert t_high - t_low > 2 * (a_high - a_low)


def test_interval_without_a_spike_is_not_empty():
    low, high = interval(np.random.default_rng(0).normal(size=1128))
    assert low == 0.0
    assert (1 - high / 100) ** 1000 == pytest.approx(0.05)
    assert spike_score(np.ones(128 + 19)).interval is None


def test_needed_steps():
    # Three pairs of rates printed for OLMo 2.
    pairs = [(0.0040, 0.0003), (0.0016, 0.00092), (0.00108, 0.00069)]
    assert [round(needed_steps(*pair, power=0.5), -2) for pair in pairs] == [1300, 21800, 46500]
    assert needed_steps(0.02, 0.01, power=0.5) == 1200
    assert needed_steps(0.02, 0.01, power=0.8) == needed_steps(0.02, 0.01) == 2400
    for bad in ((0.1, 0.1, 0.5), (-0.1, 0.1, 0.5), (0.1, 0.2, 0.9)):
        with pytest.raises(ValueError, match=r"rates are|power is"):
            needed_steps(*bad)


def test_every_definition_names_itself():
    assert {name: d.label for name, d in DEFINITIONS.items()} == {
        "olmo2": "olmo2[W=1000,k=7]",
        "olmo_core": "olmo_core[W=128,k=6]",
        "llm_c": "llm_c[W=128,k=7]",
        "robust": "robust[W=64,k=7]",
    }
    assert isinstance(DEFINITIONS["olmo2"], Definition)
    assert spike_score(np.ones(200)).as_dict(np.arange(200, 400))["steps"] == []
    x = [1.0, 3.0] * 64 + [NAN]
    assert spike_score(x).as_dict(10 * np.arange(1, 130))["steps"] == [1290]


@pytest.mark.parametrize(("name", "found"), [("llm_c", True), ("olmo_core", False), ("robust", True)])
def test_a_small_jump_out_of_a_flat_window(name, found):
    flags = flag_spikes(np.r_[np.full(200, 2.0), 2.001], DEFINITIONS[name])
    assert np.flatnonzero(flags).tolist() == [200] * found
