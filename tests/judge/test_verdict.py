from typing import Any

import numpy as np
import pytest

import stability_lab.judge.log
from stability_lab.judge.verdict import Evidence, Verdict, diverged_at, initial_loss_warning, verdict

Log: Any = stability_lab.judge.log.Log  # lists are fine too, which its annotations do not say

NAN, INF = float("nan"), float("inf")
L0, ENTROPY = 5.5, 3.2


def judge(loss, grad_norm=None, **changes):
    given = {
        "initial_val_loss": L0,
        "final_val_loss": 2.0,
        "unigram_entropy": ENTROPY,
        "warmup_steps": 10,
        **changes,
    }
    steps = np.arange(1, len(loss) + 1)
    loss = np.asarray(loss) + 1e-9 * steps  # exactly the same losses are another matter
    norm = np.ones(len(loss)) if grad_norm is None else grad_norm
    return verdict(Log(steps, loss, norm, lr=steps * 1e-3, tokens=steps * 64), Evidence(**given))


def score(loss, norm=None, first=1, **more):
    """The verdict on a log of which nothing else is known."""
    evidence = Evidence(**{key: more.pop(key) for key in list(more) if key in Evidence.__annotations__})
    return verdict(Log(np.arange(first, first + len(loss)), loss, norm, **more), evidence)


def noise(n, sd=0.02, seed=0):
    return sd * np.random.default_rng(seed).normal(size=n)


def norm_with(n=300, at=(), times=5.0, lasts=1):
    norm = np.exp(noise(n, 0.05))
    for i in at:
        norm[i : i + lasts] *= times
    return norm


def fall(n=300, to=2.0):
    return np.linspace(L0, to, n)


def learned(n=1000, sd=0.02):
    """A log that falls from 5.5 to 2 nats and stays."""
    return 2 + 3.5 * np.exp(-np.arange(n) / 60) + noise(n, sd)


def fall_and_rise(n=300, low=2.0, end=4.0):
    return np.concatenate([np.linspace(L0, low, n // 2), np.full(n // 4, low), np.full(n - n // 2 - n // 4, end)])


# Stable and spiky


def test_stable():
    result = judge(fall())
    assert (result.verdict, result.first_bad_step) == ("stable", None)
    assert result.reason == "The loss fell from 5.477 to 2.111 nats and stayed finite, without a spike."


@pytest.mark.parametrize(
    ("n", "spikes", "expected"), [(1000, 10, "stable"), (1000, 11, "spiky"), (10_000, 60, "stable")]
)
def test_short_spikes_are_a_matter_of_their_rate(n, spikes, expected):
    # 95% of 10 in 1,000 begin at 4.8 per 1,000, of 11 at 5.5, of 60 in 10,000 at 4.6; the limit is 5.
    loss = learned(n)
    loss[np.linspace(200, n - 50, spikes).astype(int)] += 1.0
    result = score(loss)
    assert result.verdict == expected
    assert f"{spikes} spikes" in result.reason
    assert "where healthy runs have up to 5" in result.reason
    assert "first at step 201: loss up to" in result.reason


@pytest.mark.parametrize(("spikes", "expected"), [(1, "stable"), (2, "spiky")])
def test_spikes_that_last_longer_than_three_values_count_more(spikes, expected):
    # 95% of 1 in 1,000 begin at 0.03 per 1,000, of 2 at 0.24; the limit is 0.1.
    norm = norm_with(1000, np.linspace(200, 900, spikes).astype(int), lasts=5)
    result = score(learned(), norm)
    assert result.verdict == expected
    if expected == "spiky":
        assert "2 spikes that took over 3 values to recover: 2.0 per 1,000 values (95%: 0.2 to 7.2)" in result.reason


def test_one_spike_from_which_the_run_recovers_slowly_is_enough():
    loss = learned(5000)
    loss[2000:] += 2 * np.exp(-np.arange(3000) / 25)
    result = score(loss)
    assert result.verdict == "spiky"
    assert "1 spike that took over 20 values to recover" in result.reason


def test_a_spike_of_loss_and_gradient_norm_is_one():
    loss = learned()
    loss[[300, 500, 700]] += 1.0
    result = score(loss, norm_with(1000, (301, 501, 701)))
    assert "3 spikes, back within 3 values: " in result.reason


def test_a_burst_counts_each_time():
    loss = learned(4000)
    loss[1000:1480:8] += 0.8
    result = score(loss)
    assert result.verdict == "spiky"
    assert "60 spikes" in result.reason


def test_a_run_that_begins_to_spike_late_is_not_saved_by_its_length():
    loss = learned(20_000)
    loss[19_000::40] += 0.8
    result = score(loss)
    assert result.verdict == "spiky"
    assert "25 spikes in the most spiky 1,000: 25 per 1,000 values" in result.reason


def test_a_loss_that_is_nan_once_makes_a_run_spiky_and_a_gradient_does_not():
    loss, norm = learned(), norm_with(1000)
    norm[[1, 2, 400]] = NAN, INF, INF
    assert score(loss, norm).verdict == "stable"
    loss[500] = NAN
    assert score(loss, norm).verdict == "spiky"


def test_a_gradient_norm_alone():
    result = verdict(Log(np.arange(1, 301), None, norm_with(300, (100, 150, 200), lasts=6)))
    assert result.verdict == "spiky"
    assert "gradient norm stayed finite" in result.reason
    assert verdict(Log(np.arange(1, 301), None, np.r_[np.ones(299), INF])).first_bad_step == 300


# Changes of the data


def mixture(jump, after=0.0, n=2000):
    t = np.arange(n)
    loss = 2.2 + 3 * np.exp(-t / 250) + noise(n, 0.04)
    loss[700:] = loss[700:] + jump if after == 0 else loss[690:700].mean() + jump + noise(n - 700, 0.04)
    return loss


@pytest.mark.parametrize("jump", [0.4, 1.3, 2.5])
def test_a_new_level_from_which_the_loss_falls_on_is_the_data(jump):
    result = score(mixture(jump))
    assert result.verdict == "stable"
    assert "level shift at step 701" in result.reason
    assert "as when the data change" in result.reason


@pytest.mark.parametrize("jumps", [[3.2], [9.0], [20.0], [1.0, 1.0, 1.0]])
def test_no_data_add_so_much(jumps):
    t = np.arange(4000)
    loss = 3 + 7.8 * np.exp(-t / 150) + 0.5 * np.exp(-t / 3000) + noise(4000, 0.04)
    for i, jump in enumerate(jumps):
        loss[1500 + 500 * i :] += jump
    assert score(loss).verdict == "diverged"


def test_the_reason_of_a_shifted_run_has_the_loss_of_the_log():
    loss = mixture(1.3)
    assert f"rose to {np.median(loss[-20:]):.3f}" in score(loss).reason


def test_a_new_level_on_which_it_stays_is_none():
    assert score(mixture(1.3, after=1)).verdict == "diverged"
    assert score(mixture(0.4, after=1)).verdict == "undecided"


def test_our_own_runs_have_one_source_of_data():
    # So that an own run cannot be excused by it.
    assert score(mixture(1.3), own=True).verdict == "diverged"


# Diverged: not finite


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("signal", ["loss", "gradient norm"])
@pytest.mark.parametrize("steps", [3, 300])
def test_nonfinite_to_the_end_is_diverged_at_any_length(signal, value, steps):
    loss, norm = fall(steps), np.ones(steps)
    (loss if signal == "loss" else norm)[1:] = value
    result = judge(loss, norm)
    assert (result.verdict, result.first_bad_step) == ("diverged", 2)
    assert f"The {signal} is {value} at step 2" in result.reason


def test_the_first_nonfinite_signal_is_named():
    loss, norm = fall(), np.ones(300)
    loss[50:] = NAN
    norm[40:] = INF
    result = judge(loss, norm)
    assert result.first_bad_step == 41
    assert "gradient norm is inf at step 41" in result.reason


def test_an_overflow_long_before_is_not_the_begin_of_the_end():
    loss, norm = fall(), np.ones(300)
    norm[[40, 250]] = INF
    loss[251:] = NAN
    assert judge(loss, norm).first_bad_step == 251
    norm[262::20] = 1.0  # finite values between bad ones are no recovery
    loss[262::20] = 3.0
    assert judge(loss, norm).first_bad_step == 251


def test_nonfinite_validation_loss_is_diverged():
    result = judge(fall(), final_val_loss=NAN)
    assert (result.verdict, result.first_bad_step) == ("diverged", 300)


def test_a_parameter_that_is_not_finite_is_diverged():
    result = judge(fall(), nonfinite_parameter=True)
    assert (result.verdict, result.first_bad_step) == ("diverged", 300)
    assert "parameter" in result.reason


# Diverged: above the lowest level


def test_finite_rise_against_the_formula():
    loss = fall_and_rise()
    for n in range(227, 260):
        end, lowest = np.median(loss[n - 20 : n]), min(loss[i : i + 20].mean() for i in range(n - 19))
        assert (judge(loss[:n], final_val_loss=2.1).verdict == "diverged") == (end > lowest + 1.0), n


def test_the_first_bad_step_is_that_of_the_rise_and_not_of_the_lagging_median():
    result = judge(fall_and_rise(), final_val_loss=4.0)
    assert (result.verdict, result.first_bad_step) == ("diverged", 226)
    assert "left its level at step 226" in result.reason


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "jump"), [(50_000, 1.1), (2000, 1.5), (300, 3.0)])
def test_the_first_bad_step_in_noise(n, jump, seed):
    loss = 2 + noise(n, 0.1, seed)
    begin = int(0.6 * n)
    loss[begin:] += jump
    loss[begin - 5] += 50  # one outlier is no beginning
    assert score(loss).first_bad_step == begin + 1


def test_the_first_bad_step_of_a_straight_rise_is_at_half_of_what_counts():
    rise = np.r_[np.linspace(4.0, 2.0, 200), np.full(200, 2.0), np.linspace(2.0, 4.0, 1000)]
    result = score(rise)
    assert result.first_bad_step is not None
    assert rise[result.first_bad_step - 1] == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(("end", "expected"), [(3.0, "undecided"), (3.001, "diverged")])
def test_rise_of_exactly_one_nat_is_no_divergence(end, expected):
    assert judge(fall_and_rise(end=end), final_val_loss=2.9).verdict == expected


def test_recovered_rise_is_no_divergence_and_not_blamed():
    loss = fall_and_rise(400)
    loss[330:] = 2.0
    assert judge(loss).verdict == "spiky"
    again = np.concatenate([loss, np.full(100, 4.0)])
    assert judge(again).first_bad_step == 401


@pytest.mark.parametrize("n", [300, 5000, 50_000])
def test_a_late_explosion_is_diverged_at_any_length(n):
    loss = learned(n, 0.1)
    loss[-30:] += np.linspace(0.2, 4, 30)
    result = score(loss)
    assert result.verdict == "diverged"
    assert f"with a peak of {loss.max():.3f} at step" in result.reason or n == 300
    assert n - 30 <= (result.first_bad_step or 0) <= n - 15


def test_the_last_values_may_be_a_spike():
    loss = learned()
    loss[-5:] += np.linspace(0.5, 2, 5)
    result = score(loss)
    assert result.verdict == "undecided"
    assert "is not back from a spike at step 996" in result.reason
    loss[-5:-1] = 2.0  # the very last value alone
    assert score(loss).verdict == "undecided"
    loss[-1] = 200.0
    assert score(loss).verdict == "diverged"
    assert "The loss ended at 200.000 nats, above the first losses" in score(loss).reason


def test_warm_up_excuses_nothing():
    loss = np.r_[fall(100), np.linspace(2.0, 6.5, 100)]
    for warmup in (0, 100, 200):
        result = judge(loss, warmup_steps=warmup, final_val_loss=6.5)
        assert (result.verdict, "warming up" in result.reason) == ("diverged", True)  # its rate rises throughout
    assert (
        diverged_at(Log(np.arange(1, 201), loss, None), warmup_steps=200) is None
    )  # a running run is not stopped there
    assert diverged_at(Log(np.arange(1, 201), loss, None), warmup_steps=100) is not None


# Diverged: above the beginning


def test_an_end_above_the_beginning_is_diverged_also_if_it_never_was_lower():
    result = judge(np.linspace(L0, 9, 300), final_val_loss=9.0)
    assert result.verdict == "diverged"
    assert (
        "The validation loss ended at 9.000 nats, above the initial loss of 5.500, with a peak of 9.000"
        in result.reason
    )
    assert "steps" not in result.reason.split(";")[1]  # more of them are no help
    blown = score(np.r_[np.linspace(10.8, 10, 8), np.linspace(14, 80, 22)])
    assert blown.verdict == "diverged"
    assert "above the first losses of 10.571" in blown.reason


@pytest.mark.parametrize(("end", "expected"), [(L0 + 0.49, "no_learning"), (L0 + 0.51, "diverged")])
def test_above_is_half_a_nat(end, expected):
    assert judge(np.r_[np.full(20, L0), np.full(280, end)], final_val_loss=end).verdict == expected


def test_a_log_that_begins_in_the_middle_has_no_beginning_to_be_above():
    loss = np.r_[np.full(80, 2.0), np.full(300, 2.7)] + noise(380)
    assert score(loss).verdict == "diverged"
    assert score(loss, first=5000).verdict == "undecided"
    assert score(loss, first=5000, initial_val_loss=2.0).verdict == "diverged"


@pytest.mark.parametrize(("final", "expected"), [(L0 - 0.04, "diverged"), (L0 - 0.06, "stable")])
def test_back_at_the_initial_loss(final, expected):
    result = judge(np.concatenate([fall(280), np.full(20, 2.0)]), final_val_loss=final)
    assert result.verdict == expected
    if expected == "diverged":
        assert "is back at the initial loss of 5.500" in result.reason


def test_back_at_the_first_losses():
    t = np.arange(1500)
    loss = 10.82 - 0.8 * (1 - np.exp(-t / 60)) + noise(1500)
    loss[700:] = 10.82 - 0.8 * np.exp(-(t[700:] - 700) / 30) + noise(800)
    result = score(loss)
    assert result.verdict == "diverged"
    assert "is back at the first losses of 10.8" in result.reason
    assert 701 <= (result.first_bad_step or 0) <= 740


# Did not learn


def test_never_lower_is_no_learning_and_not_diverged():
    result = judge(np.full(300, L0), final_val_loss=L0 + 0.3)
    assert result.verdict == "no_learning"
    assert result.first_bad_step is None
    assert "entropy of single tokens of 3.200" in result.reason
    assert "try a lower learning rate." in result.reason  # and no more steps


@pytest.mark.parametrize(("final", "expected"), [(3.151, "no_learning"), (3.149, "stable")])
def test_margin_below_the_unigram_entropy(final, expected):
    assert judge(np.full(300, 3.2), final_val_loss=final).verdict == expected
    assert judge(np.full(300, final), final_val_loss=3.2).verdict == expected


def test_single_low_steps_are_no_learning():
    loss = np.full(300, 3.3)
    loss[::50] = 2.5
    assert judge(loss, final_val_loss=3.3).verdict == "no_learning"


def test_what_a_run_that_learned_nothing_has():
    flat = 5.545 + noise(1000, 0.3)
    assert "the initial loss of 5.500" in judge(np.full(300, 5.48), final_val_loss=5.48, unigram_entropy=None).reason
    assert "first losses" in score(flat).reason
    assert "ln(256) of 5.545" in score(flat, first=4000, vocab_size=256).reason
    assert score(flat, first=4000).verdict == "stable"  # which may have learned before the log begins
    # From far above chance to chance is no learning but the scale of the logits.
    scale = 5.545 + 10 * np.exp(-np.arange(500) / 20) + noise(500)
    assert score(scale, vocab_size=256).verdict == "no_learning"
    assert score(scale).verdict == "stable"


def test_constant_loss_is_no_learning():
    for loss in (np.full(1000, 10.82), 10.82 + noise(1000), 10.82 - np.linspace(0, 0.02, 1000) + noise(1000)):
        assert score(loss).verdict == "no_learning"


def test_precedence():
    stuck = np.full(300, L0)
    spiky = norm_with(300, (150, 200, 250), lasts=6)
    assert judge(stuck, spiky, final_val_loss=L0).verdict == "no_learning"
    assert judge(fall_and_rise(low=4.0, end=5.4), spiky, final_val_loss=5.4).verdict == "diverged"


# Too little


@pytest.mark.parametrize(("n", "expected"), [(1, "undecided"), (5, "undecided"), (39, "undecided"), (40, "stable")])
def test_fewer_than_forty_values_are_too_few(n, expected):
    result = judge(fall(n))
    assert result.verdict == expected
    if expected == "undecided":
        assert f"{'one value is' if n == 1 else f'{n} values are'} too few: a verdict needs 40." in result.reason
    assert judge(np.linspace(3.0, 4.0, n)).verdict in ("undecided", "diverged")


def test_a_gradient_norm_of_exactly_zero_says_nothing():
    result = judge(fall(), np.zeros(300))
    assert result.verdict == "undecided"
    assert "exactly 0 in 300 of 300 values" in result.reason


def test_a_rise_that_is_not_over():
    loss = learned(1500)
    loss[1100:] += np.linspace(0, 0.7, 400)
    result = score(loss)
    assert result.verdict == "undecided"
    assert "is not back from a slow rise at step" in result.reason


@pytest.mark.parametrize(("times", "expected"), [(5, "stable"), (1000, "undecided")])
def test_a_gradient_norm_that_grows(times, expected):
    result = score(learned(2000), norm_with(2000) * np.geomspace(1, times, 2000))
    assert result.verdict == expected
    assert "slow rise at step" in result.reason


@pytest.mark.parametrize("rows", [60, 80, 100])
def test_a_rise_that_began_lately(rows):
    loss = learned(2000)
    loss[-rows:] += np.linspace(0, 0.9, rows)
    assert score(loss).verdict == "undecided"
    assert "rising at the end" in score(loss).reason or "is not back" in score(loss).reason


def test_losses_that_are_exactly_the_same():
    assert "exactly 10.82 throughout" in score(np.full(500, 10.82)).reason
    loss = learned()
    loss[600:] = 0.0
    result = score(loss)
    assert result.verdict == "undecided"
    assert "the last 400 losses are exactly 0" in result.reason


def test_a_log_without_a_row_cannot_be_judged():
    with pytest.raises(ValueError, match="no step"):
        judge([])


def test_skipped_steps_are_left_out():
    loss, norm = fall(), np.ones(300)
    norm[50], loss[60] = INF, NAN
    skipped = np.zeros(300, dtype=bool)
    skipped[[50, 60]] = True
    steps = np.arange(1, 301)
    assert verdict(Log(steps, loss, norm, skipped=skipped), Evidence(L0, 2.0, ENTROPY)).verdict == "stable"
    nothing = verdict(Log([1, 2], [NAN, NAN], None, skipped=[True, True]))
    assert (nothing.verdict, nothing.first_bad_step) == ("undecided", None)
    assert "All 2 steps were skipped" in nothing.reason


@pytest.mark.parametrize(("first", "last"), [(41, 1000), (900, 1000)])
def test_most_or_the_last_steps_were_skipped(first, last):
    skipped = np.zeros(1000, dtype=bool)
    skipped[first:last] = True
    result = score(learned(), skipped=skipped)
    assert result.verdict == "undecided"
    assert f"{last - first} of 1,000 steps were skipped" in result.reason


def test_an_overflow_at_the_very_end_of_a_foreign_log():
    norm = norm_with(1000)
    norm[-1] = INF
    assert score(learned(), norm).verdict == "stable"
    assert score(learned(), norm, own=True).verdict == "diverged"
    norm[-3:] = NAN
    assert score(learned(), norm).verdict == "diverged"


def test_advice_against_learning_nothing():
    slowly = np.r_[np.linspace(5.5, 3.3, 60)]
    assert "try another learning rate, or more steps" in judge(slowly, final_val_loss=3.25).reason


# What is said


def test_every_reason_is_one_sentence():
    cases = [
        judge(fall()),
        judge(fall(), norm_with(300, (100, 150, 200), lasts=6)),
        judge(fall(9)),
        judge(np.full(300, L0), final_val_loss=L0),
        judge(fall_and_rise(), final_val_loss=4.0),
        judge([NAN, 1.0]),
        score(mixture(1.3)),
    ]
    for case in cases:
        assert case.reason.endswith(".")
        assert ". " not in case.reason
        assert "\n" not in case.reason


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.linspace(4, 2, 300), "The loss fell from 3.987 to 2.064 nats and stayed finite"),
        (np.r_[np.linspace(5, 2, 200), np.linspace(2, 2.9, 200)], "fell from 4.970 to 2.031 nats, rose to 2.857"),
    ],
)
def test_the_reason_says_what_the_loss_did(loss, words):
    assert words in score(loss).reason


def test_divergence_names_step_lr_and_tokens():
    loss = fall()
    loss[40:] = NAN
    result = judge(loss)
    assert (result.first_bad_step, result.tokens_at_first_bad) == (41, 41 * 64)
    assert result.lr_at_first_bad == pytest.approx(0.041)
    assert (judge(fall()).lr_at_first_bad, judge(fall()).tokens_at_first_bad) == (None, None)


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        (0.4, ["undecided"] * 3),
        (0.7, ["diverged", "undecided", "undecided"]),
        (1.5, ["diverged", "diverged", "undecided"]),
    ],
)
def test_sensitivity_to_the_rise(rise, expected):
    loss = learned(500, sd=0.001)
    loss = np.r_[loss, np.linspace(2.0, 2.0 + rise + 0.02, 1000)]  # slow: medians of 20 lag by 0.01
    result = judge(loss, final_val_loss=2.5)
    assert result.delta == 1.0
    assert result.sensitivity == dict(zip(("0.5", "1", "2"), expected, strict=True))
    assert result.verdict == expected[1]


def test_online_equals_offline():
    loss = fall_and_rise(400, end=3.5)
    log = Log(np.arange(1, 401), loss, np.ones(400))
    seen = {n: diverged_at(log.rows(slice(n)), warmup_steps=50) for n in range(10, 401, 10)}
    offline = {n: verdict(log.rows(slice(n))).first_bad_step for n in seen}
    assert seen == offline
    assert {n for n in seen if seen[n] is None} == set(range(10, 311, 10))
    assert diverged_at(Log([1, 2], None, [1.0, 2.0])) is None


def test_first_bad_step_is_the_logs_own():
    loss = fall_and_rise()
    every_tenth = verdict(Log(10 * np.arange(1, 301), loss, None), Evidence())
    first = judge(loss, final_val_loss=4.0).first_bad_step
    assert first is not None
    assert every_tenth.first_bad_step == 10 * first


def test_a_huge_loss_does_not_hide_what_follows():
    loss = learned()
    loss[100] = 1e300
    assert judge(loss).verdict == "stable"
    loss[-30:] = 1e200
    assert judge(loss).verdict == "diverged"


def test_steps_without_a_value_are_no_nan():
    loss, norm = fall(), norm_with(300, (150, 200, 250), lasts=5)
    absent = np.arange(300) % 7 != 6
    steps = np.arange(1, 301)
    sparse = verdict(Log(steps, loss, norm, no_loss=absent), Evidence(L0, 2.0, ENTROPY))
    assert sparse.verdict == "spiky"
    assert "fell from" in sparse.reason
    alone = verdict(Log(steps, loss, np.full(300, NAN), no_grad_norm=np.ones(300)), Evidence(L0, 2.0, ENTROPY))
    assert alone.verdict == "stable"
    norm[250:] = NAN
    one = verdict(Log(steps, loss, norm, no_grad_norm=steps == 1), Evidence(L0, 2.0, ENTROPY))
    assert (one.verdict, one.first_bad_step) == ("diverged", 251)
    assert "gradient norm is nan at step 251" in one.reason


def test_a_sparse_loss_diverges_by_its_own_values():
    loss = np.repeat(fall_and_rise(), 10)
    steps = np.arange(1, 3001)
    result = verdict(Log(steps, loss, np.ones(3000), no_loss=steps % 10 != 0))
    assert (result.verdict, result.first_bad_step) == ("diverged", 2260)


# Advice


def test_the_advice_follows_the_first_symptom():
    loss = learned()
    loss[900:] = NAN
    some = np.full(1000, NAN)
    some[100] = 2345.0
    assert "largest attention logit reached 2345: try QK-norm or" in score(loss, max_attn_logit=some).reason
    later = np.full(1000, NAN)
    later[950] = 2345.0
    assert "logit" not in score(loss, max_attn_logit=later).reason
    assert "log Z reached 41 nats: try a z-loss" in score(loss, log_z=np.linspace(5, 45, 1000)).reason
    assert (
        "the gradient norm had been rising since step"
        in score(loss, norm_with(1000) * np.geomspace(1, 99, 1000)).reason
    )
    assert "warming up" in judge(np.r_[np.full(15, L0), np.full(100, 30.0)], final_val_loss=30.0).reason
    assert score(learned()).reason.endswith("without a spike.")  # and no advice
    assert score(learned(), max_attn_logit=some).reason.endswith("; but the largest attention logit reached 2345.")


def test_keys_of_this_program_are_for_its_own_runs():
    loss = learned()
    loss[900:] = NAN
    assert "optimizer.lr" not in score(loss).reason
    assert "a lower learning rate (optimizer.lr)" in score(loss, own=True).reason


def test_initial_loss():
    chance = np.log(256)
    for fine in (chance, chance + 0.9, chance - 0.4, None):
        assert initial_loss_warning(fine, 256, 3.2) is None
    for bad, words in (
        (chance + 1.1, "far above"),
        (chance - 0.6, "far below"),
        (3.1, "below the 3.200"),
        (NAN, "nan"),
    ):
        warning = initial_loss_warning(bad, 256, 3.2)
        assert warning is not None
        assert words in warning
    assert initial_loss_warning(9.0, None, None) is None


def test_defaults():
    assert Verdict("stable", "x").sensitivity == {}


def test_a_gradient_of_0_to_the_end_leaves_a_run_undecided_and_one_for_a_while_is_said():
    norm = np.ones(1000)
    norm[400:700] = 0
    result = score(learned(), norm)
    assert result.verdict == "stable"
    assert "from step 401 on the gradient norm is exactly 0 in 300 values" in result.reason
    norm[700:], norm[400:600] = 0, 1
    result = score(learned(), norm)
    assert result.verdict == "undecided"
    assert "from step 601 on the gradient norm is exactly 0" in result.reason


def test_a_jump_of_the_learning_rate_is_the_advice():
    lr = np.full(1000, 1e-3)
    lr[500:506] *= 30
    result = score(learned(), np.exp(noise(1000, 0.05)), lr=lr)
    assert result.verdict == "stable"
    assert "at step 501: learning rate up to 0.03 from 0.001, 30 times" in result.reason
    loss = learned()
    loss[506:560] += np.linspace(1, 0, 54)
    result = score(loss, np.exp(noise(1000, 0.05)), lr=lr)
    assert result.verdict == "spiky"
    assert "the learning rate jumped at step 501 and came back" in result.reason


def test_a_loss_that_was_not_finite_did_not_stay_finite():
    loss = learned()
    loss[500] = INF
    result = score(loss, np.exp(noise(1000, 0.05)))
    assert result.verdict == "spiky"
    assert "a loss that was not finite at step 501" in result.reason
    assert "stayed finite" not in result.reason


def test_a_spike_that_is_not_back_is_not_said_to_be():
    norm = np.exp(noise(1000, 0.05))
    norm[-3:] *= 3
    result = score(learned(), norm)
    assert "back within" not in result.reason


def test_no_warm_up_is_made_up():
    result = verdict(Log(np.arange(60), np.full(60, NAN), None))
    assert result.verdict == "diverged"
    assert "within the first 20 steps" in result.reason
