"""The command `ladder`: what it refuses, and one that is made, goes on and ends with a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stability_lab.commands.ladder import rates


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optimizer.lr=1",), "optimizer.lr=1: the ladder chooses it; see --range"),
        (("seed=1,2",), "seed=1,2: the ladder chooses it; see --seeds"),
        (("resume=x",), "resume=x: the ladder chooses it"),
        (("schedule=ramp",), "the ladder makes a ramp itself"),
        (("model=gpt_pico,gpt_nano",), "model: takes one value here"),
        (("+stabilizer=qknrom",), "did you mean qknorm?"),
        (("--range", "1..0"), "give two rates that ascend"),
        (("--range", "1e-30..1"), "over 100 rates"),
        (("--budget", "40x"), "give a time such as 90s, 40m or 1h30m"),
        (("--budget", "0m"), "give a time"),
        (("--runs", "0"), "--runs 0: must be 1 or more"),
        (("--seeds", "a"), "give seeds such as 3-7"),
    ],
)
def test_wrong_input_gets_one_sentence(
    words: tuple[str, ...], said: str, run_command: Callable[..., Any], here: Path
) -> None:
    shown = run_command("ladder", *words)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert said in shown.err
    assert not list(here.iterdir())


def test_the_grid_has_five_rates_a_decade() -> None:
    assert rates(1e-4, 1.0)[:6] == (0.0001, 0.000158, 0.000251, 0.000398, 0.000631, 0.001)
    assert len(rates(1e-4, 1.0)) == 21
    assert rates(0.01, 0.02) == (0.01, 0.0158)


@pytest.mark.slow
def test_a_ladder_goes_on_where_it_stopped_and_ends_with_a_table(
    run_command: Callable[..., Any], here: Path, tiny_overrides: tuple[str, ...]
) -> None:
    own = ("optimizer.lr", "trainer.max_steps", "trainer.micro_batch_size")
    words = [word for word in tiny_overrides if not word.startswith(own)]
    words += [
        "trainer.max_steps=100",
        "trainer.micro_batch_size=16",
        "+stabilizer=none,zloss",
        "stabilizer.zloss.weight=1e-3",
        "group=steps",
    ]
    options = ["--range", "1e-2..1e-1", "--seeds", "0", "sweep.workers=1"]
    first = run_command("ladder", *words, *options, "--runs", "3")
    assert first.code == 0, first.err
    assert "--runs 3: there are 3; a larger number goes on" in first.out
    assert first.out.splitlines()[1].startswith("[1 runs, ")
    assert len(list((here / "outputs" / "steps_ramps").glob("*/summary.json"))) == 2
    made = {path: path.stat().st_mtime_ns for path in (here / "outputs").rglob("summary.json")}
    second = run_command("ladder", *words, *options, "--format", "json")
    assert second.code == 0, second.err
    assert {path: path.stat().st_mtime_ns for path in made} == made
    found = json.loads(second.out)
    assert found["end"].startswith("done: ")
    assert set(found["arms"]) == {"none", "zloss"}
    runs = len(list((here / "outputs").rglob("summary.json")))
    assert runs == sum(arm["runs"] for arm in found["arms"].values()) <= 14
    for arm in found["arms"].values():
        assert arm["best_lr"] in rates(1e-2, 1e-1)
        assert arm["usable"][0] <= arm["best_lr"] <= arm["usable"][1]
    last = run_command("ladder", *words, *options)
    assert "\nLearning rates\n" in last.out
    assert "largest stable rate" in last.out
    assert len(list((here / "outputs").rglob("summary.json"))) == runs
