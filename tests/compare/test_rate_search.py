"""The sequential design finds what the whole grid shows, with few runs, and says where rates are not monotone."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from benchmarks.ladder import simulate
from stability_lab.compare.rate_search import Climb, Design, Result, Trial, next_job

RATES = tuple(0.001 * 10 ** (rung / 5) for rung in range(21))
LAST = len(RATES) - 1

Truth = Callable[[str, int, int], Result]


def climb(truth: Truth, ramps: dict[str, float | None], seeds: int = 3) -> tuple[dict[str, Climb], list[Trial]]:
    """Run the design to its end; arms as in `ramps`."""
    design = Design(tuple(ramps), RATES, tuple(range(seeds)), width=2)
    known: dict[tuple[str, int, int], Result] = {}
    done: dict[str, float | None] = {}
    jobs = []
    while (job := next_job(design, known, done)) is not None:
        jobs.append(job)
        assert len(jobs) < design.full
        assert job.rung is None or not any((job.arm, job.rung, seed) in known for seed in job.seeds)
        if job.rung is None:
            done[job.arm] = ramps[job.arm]
        else:
            known |= {(job.arm, job.rung, seed): truth(job.arm, job.rung, seed) for seed in job.seeds}
    return {arm: Climb(design, arm, known, done[arm]) for arm in ramps}, jobs


def valley(best: int, edge: int) -> Truth:
    """The loss is a parabola around the rung `best`, and runs above `edge` diverge."""

    def result(arm: str, rung: int, seed: int) -> Result:
        return Result("diverged", None) if rung > edge else Result("stable", 2 + 0.01 * (rung - best) ** 2 + 0.1 * seed)

    return result


@pytest.mark.parametrize("edge", [0, 1, 7, 15, LAST])
@pytest.mark.parametrize("ramp", [None, RATES[3] * 1.01, RATES[16]])
def test_the_edge_the_best_rate_and_the_usable_range_are_those_of_the_grid(edge: int, ramp: float | None) -> None:
    best = max(0, edge - 4)
    found, jobs = climb(valley(best, edge), {"none": ramp})
    own = found["none"]
    assert (own.low, own.high) == (edge, edge + 1)
    assert own.best_rung() == best
    assert own.usable_rungs() == (max(0, best - 1), min(edge, best + 1))
    assert jobs[0] == Trial("none", None, (0,))
    assert own.stable_above == ()
    assert set(own.tried[edge]) == {0, 1, 2}


def test_a_good_hint_needs_a_third_of_the_grid() -> None:
    found, _ = climb(valley(8, 13), {"none": RATES[15]})
    assert found["none"].runs + 1 <= len(RATES) * 3 / 3


def test_no_rate_is_stable() -> None:
    found, _ = climb(lambda arm, rung, seed: Result("diverged", None), {"none": RATES[10]})
    assert (found["none"].low, found["none"].high, found["none"].best_rung()) == (-1, 0, None)


def test_a_rate_that_is_stable_again_above_the_edge_is_said() -> None:
    def islands(arm: str, rung: int, seed: int) -> Result:
        return Result("diverged", None) if rung in (9, 10) or rung > 14 else valley(12, 14)(arm, rung, seed)

    found, _ = climb(islands, {"none": RATES[15]})
    own = found["none"]
    assert (own.low, own.high) == (8, 9)
    assert own.stable_above
    assert all(10 < rung <= 14 for rung in own.stable_above)


def test_one_seed_that_fails_moves_the_edge() -> None:
    def uneven(arm: str, rung: int, seed: int) -> Result:
        return valley(4, 9 if seed == 2 else 12)(arm, rung, seed)

    own = climb(uneven, {"none": RATES[13]})[0]["none"]
    assert (own.low, own.high) == (9, 10)


def test_what_does_not_learn_at_a_low_rate_is_undertrained_and_what_is_undecided_says_nothing() -> None:
    def slow(arm: str, rung: int, seed: int) -> Result:
        outcome = "no_learning" if rung < 5 or rung > 12 else "undecided" if seed == 1 else "spiky"
        return Result(outcome, 3.0 if outcome == "no_learning" else valley(9, 12)(arm, rung, seed).loss)

    own = climb(slow, {"none": RATES[12]})[0]["none"]
    assert (own.low, own.high, own.best_rung()) == (12, 13, 9)


def test_the_arm_with_the_widest_interval_goes_first_and_arms_share_their_seeds() -> None:
    found, jobs = climb(valley(6, 11), {"none": RATES[11], "qknorm": None})
    assert [job.rung for job in jobs[:2]] == [None, None]
    assert jobs[2].arm == "none"
    assert {(own.low, own.best_rung()) for own in found.values()} == {(11, 6)}
    for own in found.values():
        assert set(own.tried[6]) == {0, 1, 2}


def test_noisy_arms_get_the_bracket_of_the_grid_with_a_third_of_its_runs() -> None:
    """`benchmarks/ladder.py` prints the same for thousands of arms."""
    rows = [simulate(3, 0.28, number) for number in range(150)]
    runs, same, near, missed, missed_by_grid, best = (fmean(column) for column in zip(*rows, strict=True))
    assert runs < len(RATES) * 3 / 3
    assert same > 0.95
    assert near > 0.97
    assert missed <= missed_by_grid + 0.02
    assert best > 0.95
