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
    norm = np.ones(len(loss)) if grad_norm is None else grad_norm
    return verdict(Log(steps, loss, norm, lr=steps * 1e-3, tokens=steps * 64), Evidence(**given))


def spiky_norm(n=300, at=(150, 200, 250)):
    norm = np.random.default_rng(0).normal(1.0, 0.05, n)
    norm[list(at)] = 5.0
    return norm


def fall(n=300, to=2.0):
    return np.linspace(L0, to, n)


def fall_and_rise(n=300, low=2.0, end=4.0):
    return np.concatenate([np.linspace(L0, low, n // 2), np.full(n // 4, low), np.full(n - n // 2 - n // 4, end)])


def test_stable_and_spiky():
    assert judge(fall()).verdict == "stable"
    assert judge(fall()).first_bad_step is None
    spiky = judge(fall(), spiky_norm())
    assert spiky.verdict == "spiky"
    assert "3 spikes in 300 values, the first at step 151: gradient norm up to 5" in spiky.reason
    assert "1 spike in 300 values" in judge(fall(), spiky_norm(at=[150])).reason


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.full(300, 10.8), "The loss began and ended at 10.800 nats and stayed finite, without a spike."),
        (np.linspace(4, 2, 300), "The loss fell from 3.936 to 2.064 nats and stayed finite"),
        (np.linspace(2.0, 2.9, 300), "The loss rose from 2.029 to 2.871 nats"),
        (np.linspace(2.0, 2.9, 300), "without a spike, but with a slow rise at step 150: median loss"),
        (np.r_[np.linspace(5, 2, 200), np.linspace(2, 2.9, 200)], "fell from 4.857 to 2.031 nats, rose to 2.857"),
        (np.r_[np.full(200, 2.0), np.full(200, 2.6)], "8 spikes; and a level shift at step 201: median loss"),
        (np.linspace(2, 9, 99), "rose from 2.679 to 8.321 nats (a finite rise is divergence from 40 values and"),
        ([3.0], "The loss is 3.000 nats in the only value; the run is too short"),
        ([3.0, 2.0], "The loss fell from 3.000 to 2.000 nats and stayed finite; the run is too short"),
    ],
)
def test_the_reason_says_what_the_loss_did(loss, words):
    assert words in verdict(Log(np.arange(1, len(loss) + 1), loss, None)).reason


def test_too_short_for_spikes_is_stable_and_says_so():
    result = judge(fall(20))
    assert result.verdict == "stable"
    assert "too short" in result.reason


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("signal", ["loss", "gradient norm"])
@pytest.mark.parametrize("steps", [3, 300])
def test_nonfinite_is_diverged_at_any_length(signal, value, steps):
    loss, norm = fall(steps), np.ones(steps)
    (loss if signal == "loss" else norm)[1] = value
    result = judge(loss, norm)
    assert (result.verdict, result.first_bad_step) == ("diverged", 2)
    assert f"The {signal} is {value} at step 2" in result.reason


def test_the_first_nonfinite_signal_is_named():
    loss, norm = fall(), np.ones(300)
    loss[50:] = NAN
    norm[40] = INF
    result = judge(loss, norm)
    assert result.first_bad_step == 41
    assert "gradient norm is inf at step 41" in result.reason


def test_nonfinite_validation_loss_is_diverged():
    result = judge(fall(), final_val_loss=NAN)
    assert (result.verdict, result.first_bad_step) == ("diverged", 300)


def test_finite_rise_against_the_formula():
    loss = fall_and_rise()
    means = [loss[i : i + 20].mean() for i in range(len(loss) - 19)]
    seen = next(n for n in range(100, 301) if max(means[: n - 19]) > min(means[: n - 19]) + 1.0 and n > 226)
    for n in (seen - 1, seen):
        expected = "diverged" if means[n - 20] > min(means[: n - 19]) + 1.0 else "spiky"
        assert judge(loss[:n], final_val_loss=2.1).verdict == expected


def test_the_first_bad_step_is_that_of_the_rise_and_not_of_the_lagging_mean():
    result = judge(fall_and_rise(), final_val_loss=4.0)
    assert (result.verdict, result.first_bad_step) == ("diverged", 226)
    assert "left its level at step 226" in result.reason


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "jump"), [(50_000, 1.1), (2000, 1.5), (300, 3.0)])
def test_the_first_bad_step_in_noise(n, jump, seed):
    loss = 2 + 0.1 * np.random.default_rng(seed).normal(size=n)
    begin = int(0.6 * n)
    loss[begin:] += jump
    loss[begin - 5] += 50  # one outlier is no beginning
    result = verdict(Log(np.arange(1, n + 1), loss, None))
    assert result.first_bad_step == begin + 1


def test_the_first_bad_step_of_a_straight_rise_is_at_half_of_what_counts():
    rise = np.r_[np.full(200, 2.0), np.linspace(2.0, 4.0, 1000)]
    result = verdict(Log(np.arange(1, 1201), rise, None))
    assert result.first_bad_step is not None
    assert rise[result.first_bad_step - 1] == pytest.approx(2.5, abs=0.01)


@pytest.mark.parametrize(("end", "expected"), [(3.0, "spiky"), (3.001, "diverged")])
def test_rise_of_exactly_one_nat_is_no_divergence(end, expected):
    assert judge(fall_and_rise(end=end), final_val_loss=2.9).verdict == expected


def test_recovered_rise_is_no_divergence_and_not_blamed():
    loss = fall_and_rise(400)
    loss[320:] = 2.0
    assert judge(loss).verdict == "spiky"
    again = np.concatenate([loss, np.full(100, 4.0)])
    first = judge(again).first_bad_step
    assert first == 401


def test_window_is_two_percent_of_a_long_run():
    # 2,000 steps: the mean is over 40. A rise of 1.5 nats in the last 20 is one of 0.75 in the mean.
    loss = np.full(2000, 2.0)
    loss[-20:] = 3.5
    assert judge(loss).verdict == "spiky"
    assert judge(loss[-1000:]).verdict == "diverged"


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(99, 0, "spiky"), (100, 0, "diverged"), (300, 299, "diverged"), (300, 300, "spiky")],
)
def test_finite_rule_needs_100_steps_and_the_end_of_warmup(steps, warmup, expected):
    loss = np.full(steps, 2.0)
    loss[-20:] = 4.0
    assert judge(loss, warmup_steps=warmup).verdict == expected


@pytest.mark.parametrize(("final", "expected"), [(L0 - 0.05, "diverged"), (L0 - 0.06, "stable")])
def test_back_at_the_initial_loss(final, expected):
    result = judge(np.concatenate([fall(280), np.full(20, 2.5)]), final_val_loss=final)
    assert result.verdict == expected
    if expected == "diverged":
        assert result.first_bad_step == 300
        assert "initial" in result.reason


def test_back_at_the_initial_loss_blames_the_step_where_training_went_back():
    # From 4.9 to 5.8: less than 1 nat, so only the clause on the initial loss applies.
    loss = np.concatenate([np.full(150, 4.9), np.full(150, 5.8)])
    result = judge(loss, final_val_loss=5.8, unigram_entropy=None)
    assert (result.verdict, result.first_bad_step) == ("diverged", 151)


def test_never_lower_is_no_learning_and_not_diverged():
    result = judge(np.full(300, L0), final_val_loss=L0 + 0.3)
    assert result.verdict == "no_learning"
    assert result.first_bad_step is None
    assert "3.200" in result.reason


@pytest.mark.parametrize(("final", "expected"), [(3.151, "no_learning"), (3.149, "stable")])
def test_margin_below_the_unigram_entropy(final, expected):
    assert judge(np.full(300, 3.2), final_val_loss=final).verdict == expected
    assert judge(np.full(300, final), final_val_loss=3.2).verdict == expected


def test_single_low_steps_are_no_learning():
    loss = np.full(300, 3.3)
    loss[::50] = 2.5
    assert judge(loss, final_val_loss=3.3).verdict == "no_learning"


def test_without_entropy_the_initial_loss_is_the_reference():
    result = judge(np.full(300, 5.0), final_val_loss=5.0, unigram_entropy=None)
    assert result.verdict == "stable"
    stuck = judge(np.full(300, 5.48), final_val_loss=5.48, unigram_entropy=None)
    assert stuck.verdict == "no_learning"
    assert "initial validation loss" in stuck.reason


def test_without_any_reference_learning_is_not_judged():
    result = judge(np.full(300, 9.0), initial_val_loss=None, final_val_loss=None, unigram_entropy=None)
    assert result.verdict == "stable"


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_short_runs_never_diverge_while_finite(steps):
    result = judge(np.linspace(L0, L0 + 9, steps), final_val_loss=L0 + 9)
    assert result.verdict == "no_learning"
    assert "trainer.max_steps" in result.reason


def test_precedence():
    stuck = np.full(300, L0)
    assert judge(stuck, spiky_norm(), final_val_loss=L0).verdict == "no_learning"
    rising = fall_and_rise(low=4.0, end=5.4)
    assert judge(rising, spiky_norm(), final_val_loss=5.4).verdict == "diverged"


def test_every_reason_is_one_sentence():
    cases = [
        judge(fall()),
        judge(fall(), spiky_norm()),
        judge(fall(9)),
        judge(np.full(300, L0), final_val_loss=L0),
        judge(fall_and_rise(), final_val_loss=4.0),
        judge([NAN, 1.0]),
    ]
    for case in cases:
        assert case.reason.endswith(".")
        assert ". " not in case.reason
        assert "\n" not in case.reason


def test_a_log_without_a_row_cannot_be_judged():
    with pytest.raises(ValueError, match="no step"):
        judge([])


def test_divergence_names_step_lr_and_tokens():
    loss = fall()
    loss[40] = NAN
    result = judge(loss)
    assert (result.first_bad_step, result.tokens_at_first_bad) == (41, 41 * 64)
    assert result.lr_at_first_bad == pytest.approx(0.041)
    assert (judge(fall()).lr_at_first_bad, judge(fall()).tokens_at_first_bad) == (None, None)


def test_a_parameter_that_is_not_finite_is_diverged():
    result = judge(fall(), nonfinite_parameter=True)
    assert (result.verdict, result.first_bad_step) == ("diverged", 300)
    assert "parameter" in result.reason


@pytest.mark.parametrize(
    ("rise", "expected"),
    [(0.4, ["stable"] * 3), (0.7, ["diverged", "stable", "stable"]), (1.5, ["diverged", "diverged", "stable"])],
)
def test_sensitivity_to_the_rise(rise, expected):
    loss = np.linspace(2.0, 2.0 + rise + 0.02, 1000)  # slow: no spike, and the mean of 20 lags by 0.02
    result = judge(loss, final_val_loss=2.5)
    assert result.delta == 1.0
    assert result.sensitivity == dict(zip(("0.5", "1", "2"), expected, strict=True))
    assert result.verdict == expected[1]


def test_a_straight_rise_diverges_without_a_spike():
    loss = np.linspace(2.0, 3.6, 1000) + 0.01 * np.random.default_rng(0).normal(size=1000)
    result = verdict(Log(np.arange(1, 1001), loss, None))
    assert result.verdict == "diverged"
    assert result.sensitivity == {"0.5": "diverged", "1": "diverged", "2": "stable"}


def test_online_equals_offline():
    loss = fall_and_rise(400, end=3.5)
    log = Log(np.arange(1, 401), loss, np.ones(400))
    seen = {n: diverged_at(log.rows(slice(n)), warmup_steps=50) for n in range(10, 401, 10)}
    offline = {n: verdict(log.rows(slice(n)), Evidence(warmup_steps=50)).first_bad_step for n in seen}
    assert seen == offline
    assert {n for n in seen if seen[n] is None} == set(range(10, 311, 10))
    assert diverged_at(Log([1, 2], None, [1.0, 2.0])) is None


def test_skipped_steps_are_left_out():
    loss, norm = fall(), np.ones(300)
    norm[50], loss[60] = INF, NAN
    skipped = np.zeros(300, dtype=bool)
    skipped[[50, 60]] = True
    steps = np.arange(1, 301)
    assert verdict(Log(steps, loss, norm, skipped=skipped), Evidence(L0, 2.0, ENTROPY)).verdict == "stable"
    assert verdict(Log(steps, loss, norm), Evidence(L0, 2.0, ENTROPY)).first_bad_step == 51
    nothing = verdict(Log([1, 2], [NAN, NAN], None, skipped=[True, True]))
    assert (nothing.verdict, nothing.first_bad_step) == ("no_learning", None)
    assert "All 2 steps were skipped" in nothing.reason


def test_first_bad_step_is_the_logs_own():
    loss = fall_and_rise()
    every_tenth = verdict(Log(10 * np.arange(1, 301), loss, None), Evidence())
    first = judge(loss, final_val_loss=4.0).first_bad_step
    assert first is not None
    assert every_tenth.first_bad_step == 10 * first


def test_a_sparse_log_needs_two_means():
    loss = np.r_[np.full(20, 2.0), np.full(19, 4.0)]
    assert verdict(Log(100 * np.arange(1, 40), loss, None)).verdict == "spiky"
    assert verdict(Log(100 * np.arange(1, 41), np.r_[loss, 4.0], None)).verdict == "diverged"


def test_a_huge_loss_does_not_hide_what_follows():
    loss = fall()
    loss[100] = 1e300
    assert judge(loss).verdict == "spiky"
    loss[-30:] = 1e200
    assert judge(loss).verdict == "diverged"


def test_a_gradient_norm_alone():
    norm = spiky_norm()
    result = verdict(Log(np.arange(1, 301), None, norm))
    assert result.verdict == "spiky"
    assert "gradient norm stayed finite" in result.reason
    norm[20] = INF
    assert verdict(Log(np.arange(1, 301), None, norm)).first_bad_step == 21


def test_steps_without_a_value_are_no_nan():
    loss, norm = fall(), spiky_norm()
    absent = np.arange(300) % 10 != 9
    steps = np.arange(1, 301)
    sparse = verdict(Log(steps, loss, norm, no_loss=absent), Evidence(L0, 2.0, ENTROPY))
    assert sparse.verdict == "spiky"
    assert "fell from" in sparse.reason
    alone = verdict(Log(steps, loss, np.full(300, NAN), no_grad_norm=np.ones(300)), Evidence(L0, 2.0, ENTROPY))
    assert alone.verdict == "stable"
    norm[250] = NAN
    one = verdict(Log(steps, loss, norm, no_grad_norm=steps == 1), Evidence(L0, 2.0, ENTROPY))
    assert (one.verdict, one.first_bad_step) == ("diverged", 251)
    assert "gradient norm is nan at step 251" in one.reason


def test_a_sparse_loss_diverges_by_its_own_values():
    loss = np.repeat(fall_and_rise(), 10)
    steps = np.arange(1, 3001)
    result = verdict(Log(steps, loss, np.ones(3000), no_loss=steps % 10 != 0))
    assert (result.verdict, result.first_bad_step) == ("diverged", 2260)
    assert "The mean loss of 20 values" in result.reason


def test_the_advice_knows_attention_logits():
    loss = fall()
    loss[200] = NAN
    logit = np.full(300, NAN)
    logit[100] = 2345.0
    result = verdict(Log(np.arange(1, 301), loss, None, max_attn_logit=logit))
    assert "attention logit reached 2345" in result.reason
    assert "qknorm" in result.reason
    assert "logit" not in judge(loss).reason


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
