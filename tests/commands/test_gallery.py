"""The command `gallery`: what it refuses, and one stressor with two stabilizers, which goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stability_lab.commands import gallery


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stressors", "no_warmpu"), "--stressors no_warmpu: there is none of this name: did you mean no_warmup?"),
        (("--stabilizers", "none,qknrom"), "did you mean qknorm?"),
        (("--seeds", "x"), "give seeds such as 3-7"),
        (("--report-only", "--out", "nowhere"), "--out nowhere: it has no data of the gallery"),
    ],
)
def test_wrong_input_gets_one_sentence(
    words: tuple[str, ...], said: str, run_command: Callable[..., Any], here: Path
) -> None:
    shown = run_command("gallery", *words)
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert said in shown.err
    assert not list(here.iterdir())


@pytest.mark.slow
def test_a_gallery_shows_what_cures_goes_on_and_is_rebuilt_from_its_data(
    run_command: Callable[..., Any], here: Path
) -> None:
    words = ["gallery", "--stressors", "no_warmup", "--seeds", "0", "--out", "shown"]
    first = run_command(*words, "--stabilizers", "perinorm")
    assert first.code == 0, first.err
    assert "total " in first.out
    made = {path: path.stat().st_mtime_ns for path in (here / "outputs").rglob("summary.json")}
    assert len(made) == 4  # three of them without a stabilizer
    data = here / "shown" / "data" / "gallery_no_warmup_cpu.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [(row["arm"], row["seed"]) for row in rows[1:]] == [("none", 0), ("perinorm", 0), ("none", 1), ("none", 2)]
    assert all(row["summary"]["final"]["symptom"] in (0.0, 1.0) for row in rows[1:])
    again = run_command(*words, "--stabilizers", "perinorm,postnorm")
    assert again.code == 0, again.err
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert len(list((here / "outputs").rglob("summary.json"))) == 5
    page = here / "shown.md"
    content = page.read_bytes()
    page.unlink()
    shown = run_command("gallery", "--report-only", "--out", "shown")
    assert shown.code == 0, shown.err
    assert page.read_bytes() == content
    assert "no_warmup" in shown.out
    assert (here / "shown" / "figures" / "gallery.png").is_file()


@pytest.mark.slow
def test_stabilizers_that_cannot_be_combined_with_a_stressor_are_named() -> None:
    deep = next(stressor for stressor in gallery.stressors() if stressor.name == "deep")
    at = gallery.PartScale(None, seeds=(0,), more={"none": (1, 2)})
    part, made = gallery._part(deep, at, gallery._nodes(["none", "qknorm", "postnorm", "perinorm"]))
    assert list(part.arms) == ["none", "qknorm"]
    assert set(part.excluded) == {"postnorm", "perinorm"}
    assert part.excluded["postnorm"] == "the stressor itself is shown with postnorm"
    assert "norm_placement" in part.excluded["perinorm"]
    assert [[(job.arm, job.seed) for job in sweep.jobs] for sweep in made] == [
        [("none", 0), ("qknorm", 0)],
        [("none", 1), ("none", 2)],
    ]
