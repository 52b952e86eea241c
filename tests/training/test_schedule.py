"""Learning rates of step 1, 2, ..., max_steps."""

import pytest

from stability_lab.config import ConfigError, ScheduleConfig
from stability_lab.training.schedule import Schedule


def schedule(name: str, *, max_steps=100, warmup=10, final=0.1, decay=0.2, peak=2.0) -> Schedule:
    config = ScheduleConfig(name=name, warmup_steps=warmup, final_lr_fraction=final, decay_fraction=decay)
    return Schedule.of(config, peak, max_steps)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_linear_warm_up(name):
    lr = schedule(name).lr
    assert [lr(step) for step in (1, 2, 5, 10)] == pytest.approx([0.2, 0.4, 1.0, 2.0])


def test_cosine():
    lr = schedule("cosine").lr
    assert lr(55) == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way between warm-up and end
    assert lr(100) == pytest.approx(0.2)
    values = [lr(step) for step in range(10, 101)]
    assert values == sorted(values, reverse=True)
    assert schedule("cosine", final=0.0).lr(100) == pytest.approx(0.0, abs=1e-12)


def test_wsd():
    lr = schedule("wsd", final=0.0).lr
    assert {lr(step) for step in range(10, 81)} == {2.0}
    assert [lr(step) for step in (81, 90, 100)] == pytest.approx([1.9, 1.0, 0.0])


def test_ramp_rises_to_the_peak_by_one_factor_a_step_and_has_no_warm_up():
    lr = schedule("ramp", warmup=0).lr
    assert [lr(step) for step in (50, 100)] == pytest.approx([2.0 * 1000**-0.5, 2.0])
    assert {round(lr(step + 1) / lr(step), 9) for step in range(1, 100)} == {round(1000**0.01, 9)}
    with pytest.raises(ConfigError, match=r"^schedule\.warmup_steps=10: a ramp has no warm-up; set it to 0$"):
        schedule("ramp")


def test_constant():
    assert {schedule("constant").lr(step) for step in range(10, 101)} == {2.0}


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_no_warm_up_starts_at_the_peak(name):
    assert schedule(name, warmup=0, max_steps=1000).lr(1) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_longer_than_the_run_is_cut_to_it(name):
    cut = schedule(name, max_steps=5, warmup=30)
    assert cut.warmup_steps == 5
    assert [cut.lr(step) for step in range(1, 6)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 50])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_every_step_has_a_rate_up_to_the_peak(name, max_steps, warmup):
    some = schedule(name, max_steps=max_steps, warmup=warmup)
    assert all(0 < some.lr(step) <= 2.0 for step in range(1, max_steps + 1))


def test_a_shape_that_is_not_known():
    with pytest.raises(ConfigError, match=r"^schedule\.name=cosin: must be one of cosine, wsd, constant, ramp$"):
        schedule("cosin")
