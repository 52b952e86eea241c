"""Learning-rate ladders: published sensitivities, censoring, and what to try next."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stability_lab.compare.comparison import compare
from stability_lab.compare.decision import decision, tuned
from stability_lab.compare.ladders import Ladder, next_learning_rates
from stability_lab.compare.run_record import find_runs
from stability_lab.compare.suggest import suggest

# 16M parameters of arXiv:2601.02031's public results: losses over the grid of arXiv:2309.14322.
LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
BASELINE = (3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065)
ZLOSS = (3.961, 3.878, 3.848, 3.836, 3.841, 3.854, 3.955)
INITIAL = {"val/loss": 10.83}
LRS3 = (1e-3, 1e-2, 1e-1)


def ladders(path: Path) -> dict[str, Ladder]:
    return {ladder.arm: ladder for ladder in compare(find_runs([path])[0]).ladders}


@pytest.mark.oracle
def test_seven_summaries_give_the_published_sensitivity(make_run, tmp_path: Path) -> None:
    for i, lr in enumerate(LRS):
        make_run(f"n{i}", [], lr, loss=BASELINE[i], initial=INITIAL)
        make_run(f"z{i}", ["zloss"], lr, loss=ZLOSS[i], initial=INITIAL)
    found = ladders(tmp_path)
    assert found["none"].sensitivity is not None
    assert found["none"].sensitivity.value == pytest.approx(0.262, abs=5e-4)
    assert found["zloss"].sensitivity is not None
    assert found["zloss"].sensitivity.value == pytest.approx(0.046, abs=7e-4)
    assert found["none"].best_lr == 1e-2
    assert not found["none"].at_end
    assert found["zloss"].difference is not None
    assert found["zloss"].difference.value == pytest.approx(0.046 - 0.262, abs=1e-3)


def test_a_run_without_a_finite_loss_has_the_loss_at_initialisation(make_run, tmp_path: Path) -> None:
    make_run("a", [], 1e-3, loss=2.0)
    make_run("b", [], 1e-2, loss=3.0, status="diverged", verdict="diverged")
    make_run("c", [], 1e-1, loss=None, status="diverged", verdict="diverged")
    ladder = ladders(tmp_path)["none"]
    assert ladder.sensitivity is not None
    assert ladder.sensitivity_l0 is not None
    assert ladder.sensitivity.value == pytest.approx((0 + 1.0 + 3.5) / 3)
    assert ladder.sensitivity_l0.value == pytest.approx((0 + 3.5 + 3.5) / 3)
    assert ladder.losses[0] == 2.0
    assert all(loss is not None and math.isnan(loss) for loss in ladder.losses[1:])
    assert str(ladder.stable) == "[0.001, 0.01)"
    assert ladder.usable is not None
    assert ladder.usable.edge == 1e-2


def test_a_ladder_takes_an_arms_own_rates_and_differences_those_that_both_have(make_run, tmp_path: Path) -> None:
    for seed in range(2):
        for lr, loss in ((1e-3, 2.1), (1e-2, 2.0), (1e-1, 2.4)):
            make_run(f"n{lr}{seed}", [], lr, seed, loss + 0.1 * seed)
            if lr != 1e-2:
                make_run(f"q{lr}{seed}", ["qknorm"], lr, seed, loss + 0.1 * seed - 0.05 * (lr == 1e-1))
    comparison = compare(find_runs([tmp_path])[0])
    none, qknorm = comparison.ladders
    assert (none.lrs, qknorm.lrs, qknorm.common) == (LRS3, (1e-3, 1e-1), (1e-3, 1e-1))
    assert none.sensitivity is not None
    assert none.sensitivity.value == pytest.approx((0.1 + 0.0 + 0.4) / 3)
    assert qknorm.sensitivity is not None
    assert qknorm.sensitivity.value == pytest.approx(0.25 / 2)
    assert qknorm.difference is not None
    assert qknorm.difference.value == pytest.approx((0.25 - 0.3) / 2)
    assert (none.best_lr, qknorm.best_lr, qknorm.tuned) == (1e-2, 1e-3, (1e-3, 1e-3))
    assert qknorm.gain is not None
    assert qknorm.gain.value == pytest.approx(0.0)
    (sentence,) = decision(comparison)
    assert "at its best learning rate of the rates that both have (0.001)" in sentence
    assert "LR sensitivity of the rates that both have -0.025" in sentence
    from stability_lab.compare import text_report as report

    assert "Learning rates: 0.001, 0.01, 0.1 (none); 0.001, 0.1 (qknorm). Columns take" in report.text(comparison)


def test_nothing_is_said_of_rates_at_which_an_arm_has_no_run(make_run, tmp_path: Path) -> None:
    for lr in LRS3:
        make_run(f"n{lr}", [], lr, loss=2.0 + 2 * lr)
        if lr < 0.1:
            make_run(f"q{lr}", ["qknorm"], lr, loss=2.0 + lr)
        make_run(f"z{lr}", ["zloss"], lr, loss=2.0, status="failed")
    found = ladders(tmp_path)
    assert (str(found["qknorm"].stable), found["qknorm"].usable and found["qknorm"].usable.edge) == (">= 0.01", None)
    assert (found["zloss"].lrs, found["zloss"].sensitivity, found["zloss"].stable) == ((), None, None)
    sentences = decision(compare(find_runs([tmp_path])[0]))
    assert "loses 0.1 nats" not in sentences[0]
    assert sentences[1] == "zloss: no run to judge by."


def test_an_undecided_run_is_no_evidence_of_stability(make_run, tmp_path: Path) -> None:
    for lr, verdict in zip(LRS3, ("stable", "undecided", "diverged"), strict=True):
        make_run(f"n{lr}", [], lr, loss=2.0, verdict=verdict)
    ladder = ladders(tmp_path)["none"]
    assert str(ladder.stable) == "[0.001, 0.1)"
    assert ladder.losses[:2] == (2.0, 2.0)


def test_undertrained_is_not_unstable_below_the_best_learning_rate(make_run, tmp_path: Path) -> None:
    for lr, verdict, loss in ((1e-4, "no_learning", 5.4), (1e-3, "stable", 2.0), (1e-2, "no_learning", 5.4)):
        make_run(f"n{lr}", [], lr, loss=loss, verdict=verdict)
    assert str(ladders(tmp_path)["none"].stable) == "[0.001, 0.01)"


def test_one_lucky_seed_at_a_higher_rate_makes_nothing_undertrained(make_run, tmp_path: Path) -> None:
    verdicts = {1e-3: ("stable", "stable"), 1e-2: ("no_learning", "stable"), 1e-1: ("no_learning", "stable")}
    for lr, both in verdicts.items():
        for seed, verdict in enumerate(both):
            make_run(
                f"{lr}{seed}", seed=seed, lr=lr, verdict=verdict, loss=2.0 + lr + (3 if verdict == "no_learning" else 0)
            )
    stable = ladders(tmp_path)["none"].stable
    assert stable is not None
    assert (stable.low, stable.high) == (1e-3, 1e-2)


def test_the_ratio_to_the_baseline_is_an_interval(make_run, tmp_path: Path) -> None:
    for arm, first_bad in (([], 2), (["qknorm"], 3)):
        for i, lr in enumerate((6e-3, 40e-3, 60e-3, 80e-3)):
            bad = {"status": "diverged", "verdict": "diverged"} if i >= first_bad else {}
            make_run(f"{len(arm)}{i}", arm, lr, **bad)
    ladder = ladders(tmp_path)["qknorm"]
    assert str(ladder.stable) == "[0.06, 0.08)"
    assert ladder.ratio == (pytest.approx(1.0), pytest.approx(2.0))


def test_next_learning_rates_lie_beyond_an_end_beside_the_best_and_inside_the_bracket(make_run, tmp_path: Path) -> None:
    for i, (lr, loss) in enumerate(((1e-3, 2.0), (1e-2, 2.5), (1e-1, 3.0))):
        make_run(f"n{i}", [], lr, loss=loss, **({"status": "diverged", "verdict": "diverged"} if i == 2 else {}))
    assert next_learning_rates(ladders(tmp_path)["none"]) == [3.2e-4, 3.2e-3, 3.2e-2]


def test_tuned_compares_each_arm_at_its_own_best(make_run, tmp_path: Path) -> None:
    losses = {"none": {1e-3: 2.0, 1e-2: 2.5}, "qknorm": {1e-3: 2.2, 1e-2: 1.9}}
    for arm, by_lr in losses.items():
        for lr, loss in by_lr.items():
            for seed in range(3):
                make_run(f"{arm}{lr}{seed}", [] if arm == "none" else [arm], lr, seed, loss + 0.01 * seed)
    comparison = compare(find_runs([tmp_path])[0])
    (one,) = tuned(comparison)
    assert (one.ladder.arm, one.base.arm) == ("qknorm", "none")
    assert one.difference is not None
    assert one.difference.value == pytest.approx(-0.1)
    (sentence,) = decision(comparison)
    assert "at its best learning rate (0.01) 0.1 below" in sentence
    assert "none at its own (0.001)" in sentence


def test_the_suggested_commands_name_arms_rates_seeds_and_what_was_set(make_run, tmp_path: Path) -> None:
    for lr, loss in ((1e-3, 2.0), (1e-2, 2.5)):
        make_run(f"n{lr}", [], lr, loss=loss)
        make_run(f"q{lr}", ["qknorm", "zloss"], lr, loss=loss - 0.01)
    lines = suggest(compare(find_runs([tmp_path])[0]))
    rates, seeds = [line for line in lines if "stability_lab train -m" in line]
    assert "seed=0 optimizer.lr=0.00032,0.0032" in rates
    assert "'+stabilizer=none,[qknorm,zloss]' trainer.max_steps=300" in rates
    assert rates.endswith("group=sweep")
    assert "seed=1,2 optimizer.lr=0.001,0.01" in seeds


@pytest.mark.parametrize(
    ("wiggles", "seeds", "words"),
    [
        ((0.02, -0.01, 0.0), "3-7", "How many a difference takes cannot be told from these"),
        (
            (0.04, -0.01, 0.02, 0.03, -0.015, 0.03, 0.01),
            "7-16",
            "takes 9 to 77, were its size the true one (80% power)",
        ),
        ((0.02, -0.01, 0.04, 0.01, -0.05), "5-9", "How many a difference takes cannot be told from these"),  # noise
    ],
)
def test_new_seeds_are_to_be_compared_alone(make_run, tmp_path: Path, wiggles, seeds: str, words: str) -> None:
    for seed, wiggle in enumerate(wiggles):
        make_run(f"n{seed}", [], seed=seed, loss=2.0 + 0.1 * seed)
        make_run(f"q{seed}", ["qknorm"], seed=seed, loss=2.0 + 0.1 * seed + wiggle)
    why, train, alone = suggest(compare(find_runs([tmp_path])[0]), ["outputs/first"])
    assert "alone and once" in why
    assert words in why
    first, last = map(int, seeds.split("-"))
    assert f"seed={','.join(map(str, range(first, last + 1)))} " in train
    assert alone == f"  python -m stability_lab compare outputs/first --seeds {seeds}"


def test_what_takes_more_seeds_than_anybody_makes_gets_no_command(make_run, tmp_path: Path) -> None:
    wiggles = [0.06, -0.05, 0.06, -0.04, 0.05, -0.03, 0.06, 0.05, -0.05, 0.06, -0.04, 0.05]
    for seed, wiggle in enumerate(wiggles):
        make_run(f"n{seed}", [], seed=seed, loss=2.0)
        make_run(f"q{seed}", ["qknorm"], seed=seed, loss=2.0 + wiggle)
    (line,) = suggest(compare(find_runs([tmp_path])[0]))
    assert line.startswith("No new seeds: the clearest open difference takes")


def test_a_rate_that_an_arm_lacks_is_suggested(make_run, tmp_path: Path) -> None:
    for lr in LRS3:
        make_run(f"n{lr}", [], lr, loss=2.0 + lr)
        if lr < 0.1:
            make_run(f"q{lr}", ["qknorm"], lr, loss=1.9 + lr)
    lines = suggest(compare(find_runs([tmp_path])[0]))
    assert lines[0] == "Learning rates that an arm lacks (runs that are there are skipped):"
    assert "optimizer.lr=0.1 +stabilizer=none,qknorm" in lines[1]


def test_an_option_that_only_some_arms_have_makes_a_command_of_its_own(make_run, tmp_path: Path) -> None:
    for i, weight in enumerate((1e-4, 1e-5)):
        overrides = ["+stabilizer=[zloss]", f"++stabilizer.zloss.weight={weight:g}", "++seed=0"]
        make_run(f"z{i}", {"zloss": {"weight": weight}}, loss=2.0 + i, manifest={"overrides": overrides})
    commands = [line for line in suggest(compare(find_runs([tmp_path])[0])) if "train -m" in line]
    assert len(commands) == 2
    assert [word for line in commands for word in line.split() if "weight" in word] == [
        "stabilizer.zloss.weight=1e-05",
        "stabilizer.zloss.weight=0.0001",
    ]


def test_runs_of_other_programs_have_no_command(make_run, tmp_path: Path) -> None:
    make_run("a", [], manifest={"overrides": None})
    assert "not made by `train`" in suggest(compare(find_runs([tmp_path])[0]))[0]


def test_a_log_without_a_learning_rate_is_no_rung(make_run, tmp_path: Path) -> None:
    for lr in (1e-3, 1e-2):
        make_run(f"n{lr}", [], lr)
    make_run("other", [], config={"optimizer": {"eps": 1e-8}})
    assert ladders(tmp_path)["none"].lrs == (1e-3, 1e-2)


def test_an_arm_that_diverges_everywhere_is_best_nowhere(make_run, tmp_path: Path) -> None:
    for lr in (1e-3, 1e-2):
        make_run(f"n{lr}", [], lr, loss=2.0)
        make_run(f"q{lr}", ["qknorm"], lr, loss=1.9, status="diverged", verdict="diverged")
    ladder = ladders(tmp_path)["qknorm"]
    assert (ladder.best_lr, ladder.usable, ladder.at_chance) == (None, None, True)
    assert str(ladder.stable) == "< 0.001"
    assert "2 of 2 runs diverged (baseline 0 of 2)" in decision(compare(find_runs([tmp_path])[0]))[0]


def test_the_decision_is_corrected_with_the_whole_report(make_run, tmp_path: Path) -> None:
    """Two differences and a sensitivity of one arm; the gain is one of the differences."""
    base = [2.0, 2.1, 2.2, 2.3]
    shifted = [1.95, 2.08, 2.14, 2.27]
    for lr in (1e-3, 1e-2):
        for seed in range(4):
            make_run(f"n{lr}{seed}", [], lr, seed, base[seed] + (lr > 5e-3))
            make_run(f"a{lr}{seed}", ["a"], lr, seed, shifted[seed] + (lr > 5e-3))
    comparison = compare(find_runs([tmp_path])[0])
    (alone,) = decision(comparison)
    gain = comparison.ladders[1].gain
    assert gain is not None
    assert gain.p is not None
    assert gain.p == pytest.approx(0.0220, abs=1e-4)
    assert gain.p_holm == pytest.approx(3 * gain.p)
    assert "not distinguishable (-0.0400, p 0.066 by Holm)" in alone


def test_only_a_loss_has_a_ladder(make_run, tmp_path: Path) -> None:
    for lr in (1e-3, 1e-2):
        make_run(f"n{lr}", [], lr)
    assert compare(find_runs([tmp_path])[0], metric="tokens_per_s").ladders == ()


def test_seeds_are_counted_where_the_grid_is_whole(make_run, tmp_path: Path) -> None:
    from stability_lab.compare import text_report as report

    for seed, lrs in enumerate(((1e-3, 1e-2), (1e-3, 1e-2), (1e-3,))):
        for lr in lrs:
            make_run(f"n{lr}{seed}", [], lr, seed, 2.0 + 0.01 * seed)
    comparison = compare(find_runs([tmp_path])[0])
    assert comparison.ladders[0].sensitivity is not None
    assert (comparison.ladders[0].sensitivity.n, comparison.ladders[0].seeds) == (2, 3)
    assert "2 of 3 seeds: the others lack a learning rate" in report.text(comparison)


def test_stabilizers_that_came_with_a_recipe_are_not_asked_for_again(make_run, tmp_path: Path) -> None:
    overrides = ["recipe=olmo2", "++optimizer.lr=0.001", "++seed=0"]
    for lr in (1e-3, 1e-2):
        make_run(f"n{lr}", ["qknorm", "rmsnorm"], lr, loss=2.0 + lr, manifest={"overrides": overrides})
    (command,) = [line for line in suggest(compare(find_runs([tmp_path])[0])) if "train -m" in line]
    assert "+stabilizer=none recipe=olmo2" in command
