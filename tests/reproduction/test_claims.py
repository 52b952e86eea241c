"""Verdicts of a part from its runs: what is paired, what is left out, and that labels decide the sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.reproduction.catalogue import Claim, Part, PartScale, claims_of, find
from stability_lab.reproduction.claim_verdicts import (
    ABSENT,
    CONTRADICTS,
    NOT_RESOLVABLE,
    NOT_STATED,
    OPPOSITE,
    SAME,
    SAME_RESOLVED,
)
from stability_lab.reproduction.claims import NOT_BUILT, NOT_RUN, decide, ladder_of
from stability_lab.reproduction.evidence import KeptRun, PartEvidence


def made_run(
    arm: str,
    seed: int,
    loss: float | None,
    lr: float | None = None,
    setting: str = "",
    *,
    status: str = "completed",
    batch: str = "first",
    spikes: tuple[int, int] = (0, 0),
    **final: Any,
) -> KeptRun:
    summary: dict[str, Any] = {
        "status": status,
        "verdict": "diverged" if status == "diverged" else "stable",
        "initial": {"val/loss": 5.5},
        "final": {**({} if loss is None else {"val/loss": loss}), **final},
        "max_attn_logit": 10.0,
        "scores": {"grad_norm": {"olmo2": _score(*spikes)}},
    }
    manifest = {"data": {"fingerprint": "d", "first_batch": f"{batch}{seed}", "last_batch": "l", "validation": "v"}}
    config = {"seed": seed, "optimizer": {"lr": lr or 3e-3}, "stabilizer": {}}
    return KeptRun(arm, setting, lr, seed, RunRecord(Path("run"), config, manifest, summary))


def _score(spikes: int, scored: int) -> dict[str, Any]:
    return {"score": 100 * spikes / scored if scored else None, "n_spikes": spikes, "n_scored": scored}


PART = Part("n", "p", "?", {"cpu": PartScale(1, lrs=(1e-3, 1e-2, 1e-1))}, arms={"a": (), "b": ()})


def claim(kind: str, name: str = "n-x", **test: Any) -> Claim:
    return Claim(name, ("p",), "s", {"text": "t"}, {"v": 1}, {"kind": kind, **test})


def verdict(runs: Sequence[KeptRun], kind: str, part: Part = PART, **test: Any) -> str:
    (decided,) = decide(part, [claim(kind, **test)], PartEvidence({}, tuple(runs)))
    return decided.finding.verdict


def arms(a: Sequence[float], b: Sequence[float], **more: Any) -> list[KeptRun]:
    return [
        made_run(arm, seed, loss, **more) for arm, losses in (("a", a), ("b", b)) for seed, loss in enumerate(losses)
    ]


def swapped(runs: Sequence[KeptRun]) -> list[KeptRun]:
    return [dataclasses.replace(run, arm={"a": "b", "b": "a"}[run.arm]) for run in runs]


LOW, HIGH = [1.80, 1.82, 1.79], [1.90, 1.91, 1.90]
TEST = {"a": "a", "b": "b", "direction": -1}


def test_swapped_labels_turn_a_verdict_round() -> None:
    clear, near = arms(LOW, HIGH), arms(LOW, [1.84, 1.80, 1.80])
    assert (verdict(clear, "difference", **TEST), verdict(swapped(clear), "difference", **TEST)) == (
        SAME_RESOLVED,
        CONTRADICTS,
    )
    assert (verdict(near, "difference", **TEST), verdict(swapped(near), "difference", **TEST)) == (SAME, OPPOSITE)


def test_pairs_are_seeds_that_saw_the_same_batches() -> None:
    # Seeds differ far more than arms: only pairs show it.
    a, b = [1.0, 2.0, 3.0], [1.1, 2.11, 3.09]
    assert verdict(arms(a, b), "difference", **TEST) == SAME_RESOLVED
    other = [made_run("b", seed, loss, batch="other") for seed, loss in enumerate(b)]
    runs = [*arms(a, [])[:3], *other]
    assert verdict(runs, "difference", **TEST) != SAME_RESOLVED
    assert verdict(runs, "equivalence", a="a", b="b", margin=9) == NOT_RESOLVABLE


def test_a_diverged_run_is_in_no_mean() -> None:
    runs = [*arms(LOW, HIGH), made_run("a", 3, 9.0, status="diverged"), made_run("b", 3, 1.0)]
    assert verdict(runs, "difference", **TEST) == SAME_RESOLVED
    gone = [made_run("a", 0, None, status="diverged"), made_run("b", 0, 1.0)]
    assert verdict(gone, "difference", **TEST) == NOT_RESOLVABLE


def test_differences_are_corrected_for_their_number() -> None:
    runs = arms([1.0, 1.0, 1.0], [1.01, 1.02, 1.012])
    one = [claim("difference", **TEST)]
    alone = decide(PART, one, PartEvidence({}, tuple(runs)))
    assert alone[0].finding.verdict == SAME_RESOLVED
    many = decide(PART, one * 5, PartEvidence({}, tuple(runs)))
    assert {j.finding.verdict for j in many} == {SAME}


def test_other_arms_of_the_setting_show_how_much_runs_vary() -> None:
    """Two arms of three seeds hardly know their own spread: 2 degrees of freedom, and 6 with two further arms."""
    runs = arms([1.80, 1.82, 1.79], [1.83, 1.85, 1.85])
    more = [made_run(arm, seed, 2.0 + 0.01 * (seed == n)) for n, arm in enumerate("cd") for seed in range(3)]
    elsewhere = [dataclasses.replace(run, setting="x") for run in more]
    assert verdict(runs, "difference", **TEST) == SAME
    assert verdict([*runs, *more], "difference", **TEST) == SAME_RESOLVED
    assert verdict([*runs, *elsewhere], "difference", **TEST) == SAME


def test_the_learning_rate_is_named_by_its_place() -> None:
    def found(runs: Sequence[KeptRun], at: int, **more: Any) -> str:
        test = claim("difference", **TEST, at=at, **more)
        (decided,) = decide(PART, [test], PartEvidence({"scale": "cpu"}, tuple(runs)))
        return decided.finding.verdict

    runs = [*arms(LOW, HIGH, lr=1e-3), *arms(HIGH, LOW, lr=1e-1)]
    assert found(runs, 0) == SAME_RESOLVED
    assert found(runs, -1) == CONTRADICTS
    assert found(runs, -1, up_to=1e-3) == SAME_RESOLVED
    # Where no run has the last rate the claim is not decided at another.
    assert found(runs[:6], -1) == NOT_RESOLVABLE


def test_the_metric_may_be_another() -> None:
    runs = [
        made_run(arm, seed, 1.0, rms_growth=growth + 0.01 * seed)
        for arm, growth in (("a", 1), ("b", 3))
        for seed in range(3)
    ]
    assert verdict(runs, "difference", **TEST) == NOT_RESOLVABLE  # the losses are equal
    assert verdict(runs, "difference", **TEST, metric="rms_growth") == SAME_RESOLVED
    part = dataclasses.replace(PART, metric="rms_growth")
    runs[0] = made_run("a", 0, 1.0, rms_growth=1.1)
    assert verdict(runs, "difference", part, **TEST) == SAME_RESOLVED


def ladder(losses: dict[str, list[float]], lrs: Sequence[float] = (1e-3, 1e-2, 1e-1)) -> list[KeptRun]:
    """Three seeds that differ by a little."""
    return [
        made_run(arm, seed, loss + 0.01 * seed * (1 + i), lr, status="diverged" if loss > 4 else "completed")
        for arm, ladder in losses.items()
        for i, (lr, loss) in enumerate(zip(lrs, ladder, strict=True))
        for seed in range(3)
    ]


def test_lr_sensitivity_is_that_of_the_definition() -> None:
    runs = ladder({"a": [2.0, 2.1, 2.2], "b": [2.0, 2.5, 3.0]})
    found = ladder_of(PART, PartEvidence({}, tuple(runs)), "a", "b")
    assert found is not None
    assert found.sensitivity is not None
    # Seed s: losses 2.0 + .01 s, 2.1 + .02 s, 2.2 + .03 s, less the first: (0 + .1 + .01 s + .2 + .02 s) / 3.
    assert found.sensitivity.value == pytest.approx(0.1 + 0.01)
    assert found.difference is not None
    assert found.difference.value == pytest.approx(0.1 - 0.5)
    assert verdict(runs, "lr_sensitivity", **TEST) in (SAME_RESOLVED, NOT_RESOLVABLE)


def test_the_largest_stable_learning_rate_is_compared_by_brackets() -> None:
    runs = ladder({"a": [2.0, 2.1, 5.0], "b": [2.0, 5.0, 5.0]})
    up = {"a": "a", "b": "b", "direction": 1}
    assert verdict(runs, "stable_lr", **up) == SAME_RESOLVED
    assert verdict(swapped(runs), "stable_lr", **up) == CONTRADICTS
    assert verdict(ladder({"a": [2.0, 2.1, 5.0], "b": [2.0, 2.2, 5.0]}), "stable_lr", **up) == NOT_RESOLVABLE
    assert verdict(arms(LOW, HIGH), "stable_lr", **up) == NOT_RESOLVABLE
    gap = [run for run in runs if (run.arm, run.lr) != ("b", 1e-2)]
    assert verdict(gap, "stable_lr", **up) == NOT_RESOLVABLE


def test_a_sensitivity_up_to_a_learning_rate() -> None:
    runs = ladder({"a": [2.0, 2.1, 3.9], "b": [2.0, 2.5, 3.0]})
    evidence = PartEvidence({}, tuple(runs))
    for up_to, expected in ((1.0, (0.1 + 1.9 - 0.5 - 1.0) / 3), (1e-2, (0.1 - 0.5) / 2)):
        (decided,) = decide(PART, [claim("lr_sensitivity", **TEST, up_to=up_to)], evidence)
        assert decided.finding.value == pytest.approx(expected)


def test_what_is_missing_is_said_and_makes_nothing_clearer() -> None:
    runs = arms([1.0, 1.0, 1.0], [1.01, 1.02, 1.012])
    absent = claim("difference", a="a", b="c", direction=-1)
    first, *rest = decide(PART, [claim("difference", **TEST), *[absent] * 4], PartEvidence({}, tuple(runs)))
    assert first.finding.verdict == SAME
    assert {j.finding.detail for j in rest} == {"c has no run with a result"}
    gap = [run for run in ladder({"a": [2.0, 2.1, 2.2], "b": [2.0, 2.5, 3.0]}) if run.arm == "a" or run.lr != 1e-2]
    (decided,) = decide(PART, [claim("lr_sensitivity", **TEST)], PartEvidence({}, tuple(gap)))
    assert decided.finding.detail == "an arm has no run at a learning rate of the other's"
    computed = dataclasses.replace(PART, arms={}, compute="growth")
    for test in (claim("samples", a="x", b="y", direction=1), claim("exact", value="y", printed=1, tolerance=0)):
        for values in ({"x": [1.0, 2.0]}, {}):
            (decided,) = decide(computed, [test], PartEvidence({}, (), values))
            assert decided.finding.verdict == NOT_RUN
            named = test.test.get("value", "y" if values else "x")
            assert decided.finding.detail == f"its data are older and have no {named}: run the part again"


@pytest.mark.parametrize("kind", ["difference", "equivalence"])
def test_why_two_arms_cannot_be_compared(kind: str) -> None:
    more: dict[str, Any] = {"margin": 1} if kind == "equivalence" else {"direction": -1}

    def found(runs: Sequence[KeptRun], metric: str = "val/loss") -> tuple[str, str]:
        (decided,) = decide(PART, [claim(kind, a="a", b="b", metric=metric, **more)], PartEvidence({}, tuple(runs)))
        return decided.finding.verdict, decided.finding.detail

    gone = [made_run("b", seed, None, status="diverged") for seed in range(3)]
    runs = arms(LOW, HIGH)
    assert found(runs, "new") == (NOT_RUN, "its data are older and have no new: run the part again")
    assert found(runs[:3]) == (NOT_RESOLVABLE, "b has no run with a result")
    assert found([*runs[:3], *gone]) == (NOT_RESOLVABLE, "b has no run with a finite value")
    if kind == "equivalence":
        other = [made_run("b", seed, loss, batch="other") for seed, loss in enumerate(HIGH)]
        assert found([*runs[:3], *other])[1] == "the arms have no pair of finite runs on the same batches"


def test_an_arm_in_a_setting() -> None:
    runs = [
        made_run("a", s, v, setting=size) for size, losses in (("x", LOW), ("y", HIGH)) for s, v in enumerate(losses)
    ]
    assert verdict(runs, "difference", a="a@x", b="a@y", direction=-1) == SAME_RESOLVED
    assert verdict(runs, "difference", a="a@x", b="a", direction=-1) == NOT_RESOLVABLE


def test_two_together_are_compared_with_the_better_of_them() -> None:
    losses = {"both": [1.60, 1.61, 1.63], "first": [1.70, 1.71, 1.70], "second": [1.60, 1.62, 1.62]}
    runs = [made_run(arm, seed, loss) for arm, seeds in losses.items() for seed, loss in enumerate(seeds)]
    test = {"a": "both", "b": ["first", "second"], "direction": -1}
    (decided,) = decide(PART, [claim("difference", **test)], PartEvidence({}, tuple(runs)))
    assert decided.finding.value == pytest.approx((0.0 - 0.01 + 0.01) / 3)
    assert verdict(runs, "difference", a="both", b="first", direction=-1) == SAME_RESOLVED
    (turned,) = decide(PART, [claim("difference", **{**test, "direction": 1})], PartEvidence({}, tuple(runs)))
    assert turned.finding.value == pytest.approx(1.84 / 3 - 2.11 / 3 + (4.84 - 1.84 - 5.11 + 2.11) / 3)
    assert verdict(runs[:6], "difference", **test) == NOT_RESOLVABLE


def test_what_no_source_states_is_measured_and_not_judged() -> None:
    runs = arms(LOW, HIGH)
    (own,) = decide(PART, [dataclasses.replace(claim("difference", **TEST), own=True)], PartEvidence({}, tuple(runs)))
    (judged,) = decide(PART, [claim("difference", **TEST)], PartEvidence({}, tuple(runs)))
    assert judged.finding.verdict == SAME_RESOLVED
    assert own.finding == dataclasses.replace(judged.finding, verdict=NOT_STATED)


def test_a_mechanism_that_is_not_there_decides_nothing() -> None:
    test = {**TEST, "needs": {"arm": "b", "metric": "abs_log_z", "rise": 3}, "up_to": 0.3}

    def found(log_z: float, lr: float = 0.3, **more: Any) -> tuple[str, str]:
        runs = arms(LOW, HIGH) + [made_run("b", seed, 2.0, lr, abs_log_z=log_z, **more) for seed in (5, 6)]
        (decided,) = decide(PART, [claim("difference", **test)], PartEvidence({}, tuple(runs)))
        return decided.finding.verdict, decided.finding.detail

    # The initial loss is 5.5.
    assert found(8.4) == (ABSENT, "abs_log_z of b rises by at most 2.9, not by 3")
    assert found(8.5)[0] == SAME_RESOLVED
    assert found(8.5, status="diverged")[0] == SAME_RESOLVED
    assert found(8.5, lr=1.0) == (NOT_RUN, "its data are older and have no abs_log_z: run the part again")


def test_spike_scores_count_diverged_runs_and_need_their_steps() -> None:
    def runs(scored: int) -> list[KeptRun]:
        return [
            made_run(arm, seed, 2.0, spikes=(n + seed, scored), status="diverged" if arm == "b" else "completed")
            for arm, n in (("a", 1), ("b", 20))
            for seed in range(3)
        ]

    test = {"a": "a", "b": "b", "rates": [0.03, 0.40]}
    assert verdict(runs(900), "spikes", **test) == SAME_RESOLVED  # 3 x 900 are more than 2,513
    assert verdict(runs(800), "spikes", **test) == NOT_RESOLVABLE
    assert verdict(swapped(runs(900)), "spikes", **test) == CONTRADICTS
    assert verdict(runs(0), "spikes", **test) == NOT_RESOLVABLE


def test_counts_are_compared_by_their_ranks() -> None:
    """4 against 4 values without overlap: p is 2 of 70, however far apart; and a run that diverged counts."""
    counts = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 700.0]]
    runs = [
        made_run(arm, seed, 2.0, status="diverged" if seed == 3 else "completed", spike_events=count)
        for arm, found in zip("ab", counts, strict=True)
        for seed, count in enumerate(found)
    ]
    part = dataclasses.replace(PART, metric="spike_events", scales={"cpu": PartScale(1)})
    (decided,) = decide(part, [claim("ranks", **TEST)], PartEvidence({}, tuple(runs)))
    assert decided.finding.verdict == SAME_RESOLVED
    assert decided.finding.detail == "p 0.029"
    assert verdict(swapped(runs), "ranks", part, **TEST) == CONTRADICTS
    same = [made_run(arm, seed, 2.0, spike_events=1.0) for arm in "ab" for seed in range(4)]
    assert verdict(same, "ranks", part, **TEST) == NOT_RESOLVABLE


def test_a_run_keeps_a_rate_where_half_of_what_the_arm_learned_is_left() -> None:
    """Single tokens have 3 nats and the best rate 2: 2.5 is the limit. `a` keeps all rates, `b` the first alone."""
    losses = {"a": (2.0, 2.1, 2.49), "b": (2.0, 2.51, None)}
    runs = [
        made_run(arm, seed, loss, lr, status="completed" if loss else "diverged")
        for arm, found in losses.items()
        for lr, loss in zip((1e-3, 1e-2, 1e-1), found, strict=True)
        for seed in range(5)
    ]
    for run in runs:
        run.record.manifest["data"]["unigram_entropy"] = 3.0
    (decided,) = decide(PART, [claim("kept", a="a", b="b", direction=1)], PartEvidence({}, tuple(runs)))
    assert decided.finding.value == 2.0
    assert decided.finding.verdict == SAME_RESOLVED
    assert verdict(swapped(runs), "kept", a="a", b="b", direction=1) == CONTRADICTS


def test_without_evidence_nothing_is_claimed() -> None:
    part = find("nvidia").parts["divergence"]
    found = decide(part, claims_of(part), None)
    assert {j.finding.verdict for j in found} == {NOT_RUN, NOT_BUILT}
    assert sum(j.finding.verdict == NOT_BUILT for j in found) == 6
