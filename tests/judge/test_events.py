import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

import stability_lab.judge.log
from stability_lab.judge.events import find_events, unexplained

Log: Any = stability_lab.judge.log.Log  # lists are fine too, which its annotations do not say

NAN, INF = float("nan"), float("inf")


def noise(n=400, level=2.0, sd=0.02, seed=0):
    return level + sd * np.random.default_rng(seed).normal(size=n)


def log_of(loss: Any = None, grad_norm: Any = None, **more):
    n = len(loss if loss is not None else grad_norm)
    steps = np.arange(1, n + 1)
    return Log(steps, loss, grad_norm, **{"lr": steps * 1e-3, "tokens": steps * 64, **more})


def only(log):
    (event,) = find_events(log)
    return event


def test_a_quiet_run_has_none():
    loss = 2 + 3 * np.exp(-np.arange(400) / 60) + noise(level=0)
    assert find_events(log_of(loss, noise(level=1, sd=0.1))) == []


def test_loss_spike():
    loss = noise()
    loss[200:203] = 3.0, 2.8, 2.3
    event = only(log_of(loss))
    assert (event.kind, event.step, event.length, event.recovery) == ("loss_spike", 201, 3, 3)
    assert event.height == pytest.approx(3.0 - np.median(loss[192:200]), abs=0.01)
    assert (event.signal, event.cause) == ("loss", None)
    assert (event.value, event.tokens) == (3.0, 201 * 64)
    assert event.lr == pytest.approx(0.201)


@pytest.mark.parametrize(("height", "found"), [(0.018, 0), (0.022, 1)])
def test_a_loss_spike_is_a_fiftieth_of_a_nat_high_however_little_noise_there_is(height, found):
    loss = noise(sd=0.0002)
    loss[200] = np.median(loss[192:200]) + height
    assert len(find_events(log_of(loss))) == found


@pytest.mark.parametrize(("factor", "found"), [(1.4, 0), (1.6, 1)])
def test_a_gradient_spike_is_one_and_a_half_times_the_level(factor, found):
    norm = noise(level=0.5, sd=0.005)
    norm[200] = factor * np.median(norm[192:200])
    events = find_events(log_of(None, norm))
    assert [event.kind for event in events] == ["grad_norm_spike"] * found
    assert all("1.6 times" in event.detail or "1.59 times" in event.detail for event in events)


@pytest.mark.parametrize("sd", [0.003, 0.03, 0.3])
def test_what_counts_is_in_units_of_the_logs_own_noise(sd):
    loss = noise(sd=sd)
    loss[[200, 300]] = 2 + np.array([5, 10]) * max(sd, 0.02 / 7)
    assert [event.step for event in find_events(log_of(loss))] == [301]


def test_a_spike_in_the_first_twenty_steps_and_while_the_loss_falls():
    loss = 2.6 + 8.2 * (1 + np.arange(400) / 40) ** -0.6 + noise(level=0)
    loss[[11, 60]] += 2.0
    # The second one is lower than the loss was 64 steps before.
    assert loss[60] < loss[:10].min()
    assert [event.step for event in find_events(log_of(loss))] == [12, 61]


@pytest.mark.parametrize("period", [200, 251, 400])
def test_of_a_slow_wave_the_first_rise_alone_is_an_event(period):
    wave = 0.4 * np.sin(2 * np.pi * np.arange(4000) / period)
    assert len(find_events(log_of(wave + 2 + noise(4000, level=0)))) <= 1


def test_waves_and_white_noise_make_no_event():
    wave = 0.3 * np.sin(2 * np.pi * np.arange(2000) / 100)
    assert find_events(log_of(wave + noise(2000))) == []
    assert find_events(log_of(noise(2000, sd=0.5))) == []
    assert find_events(log_of(None, np.exp(noise(2000, level=0, sd=0.5)))) == []


@pytest.mark.parametrize(("gap", "events"), [(10, 1), (11, 2)])
def test_spikes_up_to_ten_steps_apart_are_one_event(gap, events):
    loss = noise()
    loss[[200, 200 + gap]] = 3.0
    found = find_events(log_of(loss))
    assert len(found) == events
    assert found[0].length == (gap + 1 if events == 1 else 1)
    assert found[0].recovery == 1  # it was back between them


def test_recovery_is_within_half_the_height_that_counts():
    loss = noise(sd=0.0002)
    loss[200] = 3.0
    loss[201:220] = 2.013
    loss[220:] = 2.007
    event = only(log_of(loss))
    assert event.recovery == 20


def test_nonfinite_steps_are_their_own_kind():
    loss, norm = noise(), noise(level=1, sd=0.05)
    loss[200], norm[203], norm[300] = NAN, INF, INF
    first, second = find_events(log_of(loss, norm))
    assert (first.kind, first.step, first.length, first.recovery, first.height) == (
        "nonfinite_step",
        201,
        4,
        4,
        None,
    )
    assert second.recovery == 1
    assert str(first.value) == "nan"
    assert first.detail == "loss nan, and 1 more step"
    assert (second.step, second.value, second.detail) == (301, INF, "gradient norm inf")


def test_a_nonfinite_step_before_any_window_is_an_event():
    assert only(log_of([NAN, 1.0, 1.0])).step == 1


def test_skipped_steps_are_no_nonfinite_steps():
    loss, norm = noise(), noise(level=1, sd=0.05)
    norm[[200, 201, 300]] = INF
    skipped = ~np.isfinite(norm)
    first, second = find_events(log_of(loss, norm, skipped=skipped))
    assert (first.kind, first.step, first.length, first.recovery, first.value) == ("skipped_step", 201, 2, 2, INF)
    assert (second.kind, second.step, second.recovery) == ("skipped_step", 301, 1)


def test_level_shift():
    loss = noise(600)
    loss[300:] += 0.5
    events = {event.kind: event for event in find_events(log_of(loss))}
    assert events.keys() == {"loss_spike", "level_shift"}
    shift = events["level_shift"]
    assert shift.step == 301
    assert shift.height == pytest.approx(0.5, abs=0.03)
    assert (shift.recovery, shift.length) == (None, 600 - shift.step + 1)
    assert events["loss_spike"].recovery is None
    assert [event.kind for event in unexplained(list(events.values()))] == ["level_shift"]


@pytest.mark.parametrize(("after", "cause"), [("falls", "data"), ("flat", None), ("climbs there", None)])
def test_a_shift_after_which_the_loss_falls_on_may_be_the_data(after, cause):
    t = np.arange(1500)
    loss = 2 + 3 * np.exp(-t / 400) + noise(1500, level=0)
    loss[600:] = {"falls": loss[600:] + 0.6, "flat": loss[599] + 0.6 + noise(900, level=0)}.get(after, loss[600:] + 0.6)
    if after == "climbs there":
        loss[600:608] -= np.linspace(0.6, 0, 8)
    (shift,) = unexplained([event for event in find_events(log_of(loss)) if event.kind == "level_shift"])
    assert shift.cause == cause
    assert ("as when the data change" in shift.detail) == (cause == "data")


def test_a_spike_that_decays_slowly_is_no_drift():
    loss = noise(1500, sd=0.05)
    loss[500:] += 3 * np.exp(-np.arange(1000) / 50)
    assert [event.kind for event in unexplained(find_events(log_of(loss)))] == ["loss_spike"]


def test_level_shift_that_ends():
    loss = noise(600)
    loss[300:400] += 0.5
    (shift,) = (event for event in find_events(log_of(loss)) if event.kind == "level_shift")
    assert shift.step == 301
    assert shift.recovery is not None
    assert 95 <= shift.recovery <= 115


def test_short_spikes_and_falls_are_no_level_shift():
    loss = noise(600)
    loss[300:320] += 1.0
    loss[400:] -= 0.5
    assert {event.kind for event in find_events(log_of(loss))} == {"loss_spike"}


@pytest.mark.parametrize("steps", [300, 1000, 3000])
def test_slow_rise(steps):
    loss = np.concatenate([noise(100), np.linspace(2.0, 3.0, steps) + noise(steps, level=0)])
    event = only(log_of(loss))
    assert event.kind == "slow_rise"
    # From 0.25 nats on, seen by a median that lags by 25 steps and is taken every 25.
    assert 0 <= event.step - (100 + 0.25 * steps) <= 75
    assert event.height == pytest.approx(1.0, abs=0.15)
    assert event.recovery is None


def test_slow_rise_of_the_gradient_norm_is_relative():
    rise = np.concatenate([np.ones(100), np.geomspace(1, 5, 900), np.ones(200)])
    norm = 0.3 * rise * (1 + 0.05 * np.random.default_rng(0).normal(size=1200))
    (event,) = (event for event in find_events(log_of(None, norm)) if event.kind == "slow_rise")
    assert event.height == pytest.approx(0.3 * 4, rel=0.15)
    assert event.recovery is not None
    assert find_events(log_of(None, norm[:600])) == []  # less than three times


def test_attention_alerts():
    logit = np.full(400, NAN)
    logit[[9, 19, 29, 39, 49]] = 900.0, 1001.0, 10_001.0, 2000.0, 500.0
    alert, critical = find_events(log_of(noise(), max_attn_logit=logit))
    assert (alert.kind, alert.step, alert.value, alert.recovery, alert.length) == (
        "attention_logit_alert",
        20,
        10_001.0,
        30,
        21,
    )
    assert alert.detail.startswith("alert")
    assert (critical.step, critical.recovery, critical.length) == (30, 10, 1)
    assert critical.detail.startswith("critical")
    at_once = np.full(400, NAN)
    at_once[100] = INF
    assert only(log_of(noise(), max_attn_logit=at_once)).detail.startswith("critical")


def test_length_counts_steps_not_rows():
    loss = noise()
    loss[200:202] = 3.0
    event = only(Log(10 * np.arange(1, 401), loss, None))
    assert (event.step, event.length, event.recovery) == (2010, 20, 20)
    assert (event.lr, event.tokens) == (None, None)


def eventful(n=900):
    rng = np.random.default_rng(7)
    loss, norm = noise(n), noise(n, level=1, sd=0.08)
    loss[rng.integers(20, n, 8)] += 2.0
    norm[rng.integers(20, n, 15)] *= 6
    loss[350:430] += 0.6
    loss[[40, 500]], norm[[200, 201]] = NAN, INF
    loss[550:] += np.linspace(0, 0.8, n - 550)
    skipped = np.zeros(n, dtype=bool)
    skipped[[200, 201, 640]] = True
    logit = np.full(n, NAN)
    logit[::20] = np.geomspace(10, 3e4, logit[::20].size)
    norm[420:440] = 0.0
    lr = np.full(n, 1e-3)
    lr[760:766] = 3e-2
    lr[860:] = 0.0
    return log_of(loss, norm, skipped=skipped, max_attn_logit=logit, lr=lr)


@pytest.mark.parametrize("flush", [7, 64])
def test_flush_by_flush_finds_what_the_end_finds(flush):
    log = eventful()
    online = [event for i in range(0, len(log), flush) for event in find_events(log.rows(slice(i + flush)), start=i)]
    whole = find_events(log)
    assert {event.kind for event in whole} == {
        "loss_spike",
        "grad_norm_spike",
        "level_shift",
        "slow_rise",
        "nonfinite_step",
        "skipped_step",
        "attention_logit_alert",
        "lr_spike",
        "zero_gradient",
        "no_update",
    }
    assert Counter((e.kind, e.step) for e in online) == Counter((e.kind, e.step) for e in whole)
    assert [event.step for event in whole] == sorted(event.step for event in whole)


def test_as_dict_is_json():
    rows = [event.as_dict() for event in find_events(eventful())]
    assert list(rows[0])[:2] == ["step", "event"]
    assert json.loads(json.dumps(rows))[-1]["step"] == rows[-1]["step"]
    assert all(type(row[key]) in (int, type(None)) for row in rows for key in ("step", "length", "recovery", "tokens"))


def test_steps_without_a_value_enter_no_window_and_are_no_event():
    log = eventful()
    absent = np.arange(900) % 3 == 1
    absent[[40, 500]] = False
    dense, sparse = (
        Log(log.step, log.loss, norm, no_grad_norm=no)
        for norm, no in ((None, None), (np.where(absent, NAN, 1.0), absent))
    )
    assert str(find_events(sparse)) == str(find_events(dense))  # a NaN does not equal itself
    without = Log(log.step, log.loss, None, no_loss=np.arange(900) == 40)
    assert [e.step for e in find_events(without) if e.kind == "nonfinite_step"] == [501]


@pytest.mark.parametrize("flush", [7, 64])
def test_flush_by_flush_with_steps_that_lack_a_value(flush):
    log = eventful()
    log = Log(log.step, log.loss, log.grad_norm, skipped=log.skipped, no_grad_norm=np.arange(900) % 4 == 3)
    online = [e for i in range(0, 900, flush) for e in find_events(log.rows(slice(i + flush)), start=i)]
    assert Counter((e.kind, e.step) for e in online) == Counter((e.kind, e.step) for e in find_events(log))


def test_a_skipped_step_tells_what_it_has():
    log = Log([1, 2], [2.0, 3.0], [1.0, NAN], skipped=[False, True], no_grad_norm=[False, True])
    assert only(log).detail == "the update did not happen: loss 3"
    nothing = Log([1, 2], [2.0, NAN], None, skipped=[False, True], no_loss=[False, True])
    assert only(nothing).detail == "the update did not happen"


def test_length_counts_the_signals_own_stride():
    loss = noise()
    loss[200:202] = 3.0
    steps = np.arange(1, 4001)
    whole = np.full(4000, NAN)
    whole[9::10] = loss
    event = only(Log(steps, whole, np.ones(4000), no_loss=steps % 10 != 0))
    assert (event.step, event.length, event.recovery) == (2010, 20, 20)


def test_a_recovery_long_after_is_found_and_none_where_there_is_none():
    loss = noise(3000, sd=0.001)
    loss[500:2500] += 1.0
    assert [e.recovery for e in find_events(log_of(loss)) if e.kind == "loss_spike"] == [2000]
    assert [e.recovery for e in find_events(log_of(loss[:2400])) if e.kind == "loss_spike"] == [None]


@pytest.mark.parametrize("huge", [1e308, -1e308])
def test_numbers_near_the_largest_float(huge):
    loss = noise(600)
    loss[200:203], loss[400:] = huge, huge
    events = find_events(log_of(loss, np.abs(loss)))  # warnings are errors
    assert next(e.step for e in events if e.kind == "grad_norm_spike") == 201


@pytest.mark.parametrize(("factor", "rows"), [(30, 6), (4, 1), (100, 40)])
def test_a_learning_rate_that_jumps_and_comes_back_is_an_event(factor, rows):
    lr = np.linspace(1e-3, 5e-4, 400)
    lr[200 : 200 + rows] *= factor
    event = only(log_of(noise(), noise(level=1.0), lr=lr))
    assert (event.kind, event.step, event.length, event.recovery) == ("lr_spike", 201, rows, rows)
    assert event.value == pytest.approx(lr[200])


def schedules():
    steps = np.arange(400)
    yield "warm-up and cosine", np.r_[np.linspace(1e-7, 1e-3, 40), 5e-4 * (1 + np.cos(np.linspace(0, np.pi, 360)))]
    yield "restarts", 1e-5 + 5e-4 * (1 + np.cos(np.pi * (steps % 100) / 100))
    yield "steps down", 1e-3 * 0.1 ** (steps // 100)
    yield "triangles", 1e-4 + 9e-4 * np.abs(steps % 40 - 20) / 20
    yield "one step of warm-up", np.r_[1e-9, np.full(399, 1e-3)]


@pytest.mark.parametrize("lr", [pytest.param(lr, id=name) for name, lr in schedules()])
def test_no_schedule_is_a_fault_of_the_learning_rate(lr):
    assert not find_events(log_of(noise(), noise(level=1.0), lr=lr))


def test_a_gradient_of_exactly_0_is_an_event_that_tells_how_long():
    norm = noise(1000, level=1.0)
    norm[300:600] = 0.0
    event, *others = [e for e in find_events(log_of(noise(1000), norm)) if e.kind == "zero_gradient"]
    assert not others
    assert (event.step, event.length, event.recovery) == (301, 300, 300)
    assert event.detail == "the gradient norm is exactly 0 in 300 values"
    norm[[0, 5, 7]], norm[300:600] = 0.0, 1.0  # a value that was not measured yet, say
    assert "zero_gradient" not in {e.kind for e in find_events(log_of(noise(1000), norm))}


def test_a_gradient_without_update_is_an_event():
    lr = np.r_[0.0, np.full(299, 1e-3), np.zeros(100)]
    event = only(log_of(noise(), noise(level=1.0), lr=lr))
    assert (event.kind, event.step, event.length, event.recovery) == ("no_update", 301, 100, None)
    lr[:] = np.linspace(1e-3, 0, 400)  # a decay to 0 ends with one
    assert not find_events(log_of(noise(), noise(level=1.0), lr=lr))


def test_values_that_are_not_finite_at_the_end_never_recover():
    loss = noise()
    loss[-1] = NAN
    assert only(log_of(loss)).recovery is None
