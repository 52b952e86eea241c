"""The command `demo`: a pair of runs, a picture and three sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stability_lab.commands.demo import BEST, sentences
from stability_lab.compare.run_record import RunRecord
from stability_lab.stressors.symptom import stressor


def test_a_name_that_is_no_demonstration_gets_one_sentence(run_command: Callable[..., Any], here: Path) -> None:
    shown = run_command("demo", "attention_grwth")
    assert shown.code == 2
    assert shown.err.endswith(f": did you mean {BEST}?\n")
    shown = run_command("demo", "xyz")
    assert (shown.code, BEST in shown.err, shown.err.count("\n")) == (2, True, 1)
    assert "takes one name" in run_command("demo", BEST, "no_clip").err
    assert not list(here.iterdir())


def test_the_best_one_has_a_rescue() -> None:
    assert stressor(BEST).rescue is not None


@pytest.mark.slow
def test_demo_ends_with_a_picture_three_sentences_and_what_is_next(
    run_command: Callable[..., Any], here: Path, tiny_overrides: tuple[str, ...]
) -> None:
    words = [*tiny_overrides, "trainer.max_steps=40", "diagnostics.probe_every=10", "optimizer.lr=0.3", "seed=1"]
    shown = run_command("demo", *words, "sweep.workers=1")
    assert shown.code == 0, shown.err
    last = shown.out.splitlines()[-5:]
    assert [line.split()[0] for line in last] == ["Without", "With", "Both", "picture:", "next:"]
    picture = here / "outputs" / f"demo_{BEST}" / f"{BEST}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture.relative_to(here)) in last[3]
    assert "+stabilizer=none,qknorm" in last[4]
    assert "seed=0,1,2" in last[4]
    assert "seed=1 " not in last[4]


def pair(folder: Path, logits: tuple[float, float], embed: tuple[str, str]) -> list[RunRecord]:
    """Two runs of 40 steps, the first without a stabilizer."""
    found = []
    names, verdicts = ("none", "qknorm"), ("no_learning", "stable")
    for arm, verdict, logit, digest in zip(names, verdicts, logits, embed, strict=True):
        path = folder / arm
        path.mkdir()
        (path / "metrics.jsonl").write_text(json.dumps({"step": 40, "attn/max_abs_logit": logit}) + "\n")
        event = {"step": 40, "event": "attention_logit_alert", "length": 1}
        (path / "events.jsonl").write_text((json.dumps(event) + "\n") * (logit > 1000))
        summary = {"status": "completed", "verdict": verdict, "final": {"val/loss": 2.5}}
        manifest = {"data": {"first_batch": "a"}, "init": {"embed.weight": digest}}
        config = {"stabilizer": {} if arm == "none" else {arm: {}}}
        found.append(RunRecord(path, config, manifest, summary))
    return found


def test_the_sentences_say_when_it_broke_and_whether_the_runs_are_a_pair(tmp_path: Path) -> None:
    failed, rescued = pair(tmp_path, (5e4, 70.0), ("a", "a"))
    first, second, third = sentences(stressor(BEST), failed, rescued)
    assert "the largest attention logit left its bounds at step 40" in first
    assert "no_learning, at a validation loss of 2.500 nats" in first
    assert second.startswith("With qknorm the largest attention logit reached 70")
    assert "the same batches" in third


def test_the_sentences_do_not_claim_what_did_not_happen(tmp_path: Path) -> None:
    first, _, third = sentences(stressor(BEST), *pair(tmp_path, (50.0, 70.0), ("a", "b")))
    assert "nothing broke this time" in first
    assert "says nothing" in third
