import numpy as np
import pytest

from stability_lab.judge.verdict import verdict

NAN, INF = float("nan"), float("inf")
L0, ENTROPY = 5.5, 3.2


def judge(loss, grad_norm=None, **changes):
    given = {
        "initial_val_loss": L0,
        "final_val_loss": 2.0,
        "unigram_entropy": ENTROPY,
        "n_spikes": 0,
        "warmup_steps": 10,
        **changes,
    }
    return verdict(loss, np.ones(len(loss)) if grad_norm is None else grad_norm, **given)


def fall(n=300, to=2.0):
    return np.linspace(L0, to, n)


def fall_and_rise(n=300, low=2.0, end=4.0):
    return np.concatenate([np.linspace(L0, low, n // 2), np.full(n // 4, low), np.full(n - n // 2 - n // 4, end)])


def test_stable_and_spiky():
    assert judge(fall()).verdict == "stable"
    assert judge(fall()).first_bad_step is None
    spiky = judge(fall(), n_spikes=3)
    assert spiky.verdict == "spiky"
    assert "3 of 300 steps are spikes" in spiky.reason
    assert "1 of 300 steps is a spike" in judge(fall(), n_spikes=1).reason


def test_too_short_for_spikes_is_stable_and_says_so():
    result = judge(fall(50), n_spikes=None)
    assert result.verdict == "stable"
    assert "too short" in result.reason


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("signal", ["loss", "gradient norm"])
@pytest.mark.parametrize("steps", [3, 300])
def test_nonfinite_is_diverged_at_any_length(signal, value, steps):
    loss, norm = fall(steps), np.ones(steps)
    (loss if signal == "loss" else norm)[1] = value
    result = judge(loss, norm, n_spikes=9)
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
    result = judge(loss, final_val_loss=4.0)
    means = [loss[i : i + 20].mean() for i in range(len(loss) - 19)]
    above = [i for i, mean in enumerate(means) if mean > min(means) + 1.0 and i > int(np.argmin(means))]
    assert result.verdict == "diverged"
    assert result.first_bad_step == above[0] + 20  # the last step of the first mean that is too high


@pytest.mark.parametrize(("end", "expected"), [(3.0, "stable"), (3.001, "diverged")])
def test_rise_of_exactly_one_nat_is_no_divergence(end, expected):
    assert judge(fall_and_rise(end=end), final_val_loss=2.9).verdict == expected


def test_recovered_rise_is_no_divergence_and_not_blamed():
    loss = fall_and_rise(400)
    loss[320:] = 2.0
    assert judge(loss).verdict == "stable"
    again = np.concatenate([loss, np.full(100, 4.0)])
    first = judge(again).first_bad_step
    assert first is not None
    assert 400 < first <= 420


def test_window_is_two_percent_of_a_long_run():
    # 2,000 steps: the mean is over 40. A rise of 1.5 nats in the last 20 is one of 0.75 in the mean.
    loss = np.full(2000, 2.0)
    loss[-20:] = 3.5
    assert judge(loss).verdict == "stable"
    assert judge(loss[-1000:]).verdict == "diverged"


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(99, 0, "stable"), (100, 0, "diverged"), (300, 299, "diverged"), (300, 300, "stable")],
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
    means = [loss[i : i + 20].mean() for i in range(281)]
    assert result.verdict == "diverged"
    assert result.first_bad_step == 20 + next(i for i, mean in enumerate(means) if mean >= L0 - 0.05)


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
    assert judge(stuck, final_val_loss=L0, n_spikes=5).verdict == "no_learning"
    rising = fall_and_rise(low=4.0, end=5.4)
    assert judge(rising, final_val_loss=5.4, n_spikes=5).verdict == "diverged"


def test_every_reason_is_one_sentence():
    cases = [
        judge(fall()),
        judge(fall(), n_spikes=2),
        judge(fall(), n_spikes=None),
        judge(np.full(300, L0), final_val_loss=L0),
        judge(fall_and_rise(), final_val_loss=4.0),
        judge([NAN, 1.0]),
    ]
    for case in cases:
        assert case.reason.endswith(".")
        assert ". " not in case.reason
        assert "\n" not in case.reason


@pytest.mark.parametrize(("loss", "norm"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]])])
def test_bad_series(loss, norm):
    with pytest.raises(ValueError, match="one value per step"):
        judge(loss, norm)
