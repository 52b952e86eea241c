"""The page: what it shows of the runs, and how numbers look."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.reproduction.catalogue import Claim, Part, PartScale, Reproduction
from stability_lab.reproduction.claim_verdicts import Finding
from stability_lab.reproduction.claims import Decided
from stability_lab.reproduction.evidence import KeptRun, PartEvidence
from stability_lab.reproduction.page import claim_table, page, shown

HEAD = {"date": "2026-01-02", "device": "cpu", "versions": {"torch": "2"}, "git": None, "figures": None}
HEAD |= {"commands": ["a | b"], "seconds": 90.0}


def run(arm: str, lr: float, seed: int, loss: float, status: str = "completed") -> KeptRun:
    summary = {
        "status": status,
        "verdict": "diverged" if status == "diverged" else "stable",
        "initial": {"val/loss": 5.5},
        "final": {"val/loss": loss, "act/rms/L00": 0.5, "act/rms/L01": 1.5, "attn/entropy/L00": 1.0},
    }
    record = RunRecord(Path("r"), {"seed": seed, "optimizer": {"lr": lr}}, {"data": {}}, summary)
    return KeptRun(arm, "", lr, seed, record)


@pytest.fixture
def text() -> str:
    part = Part("n", "p", "Why?", {"cpu": PartScale(1)}, arms={"none": ()}, show=("act/rms/*",))
    runs = [run("none", lr, seed, loss + 0.1 * seed) for lr, loss in ((1e-3, 2.0), (1e-2, 2.4)) for seed in range(2)]
    runs.append(run("none", 1e-2, 2, 9.0, "diverged"))
    evidence = PartEvidence(HEAD, tuple(runs), {"x": [1.0, 3.0], "y": 2.0})
    return page(Reproduction("n", "about it", ("p",), {"p": part}, {}), {("p", "cpu"): evidence})


def rows(text: str, header: str) -> list[str]:
    """Of the table with this header."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(header))
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :]))


def test_means_are_over_runs_that_did_not_diverge(text: str) -> None:
    first, second = rows(text, "| arm | lr | seeds")
    assert first.startswith("| none | 0.001 | 2 | 0 | 2.05 ")
    # The half-width of two values is 12.706 times half their distance.
    assert "\\[1.41, 2.69\\] | 0.5 \\[0.5, 0.5\\] | 1.5 \\[1.5, 1.5\\] |" in first
    assert second.startswith("| none | 0.01 | 3 | 1 | 2.45 ")


def test_what_the_learning_rates_say(text: str) -> None:
    (ladder,) = rows(text, "| arm | LR sensitivity")
    cells = ladder.split(" | ")
    # Only seeds with all rates count, and a run that diverged finite keeps its loss, at most that of the start.
    assert cells[1].startswith("0.2 ")
    assert cells[3] == "0.001 (end of the grid)"
    assert cells[-1] == "\\[0.001, 0.01) |"


def test_what_was_computed_and_how_it_was_run(text: str) -> None:
    assert rows(text, "| value | seeds") == ["| x | 2 | 2 \\[-10.7, 14.7\\] |"]
    assert "1.5 minutes, summed over runs" in text
    assert "```\na | b\n```" in text
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (Finding("", 0.000579656633), "0.00057966"),
        (Finding("", 3.99999992), "4"),
        (Finding("", 1500.0), "1500"),
        (Finding("", -0.0317, -0.0411, -0.02229), "-0.0317 [-0.0411, -0.0223]"),
        (Finding("", 1306.3, -4313.3, float("inf")), "1306 [-4313, ∞]"),
        (Finding("", None, 1.0, float("inf")), "[1, ∞]"),
        (Finding(""), "-"),
    ],
)
def test_numbers_have_the_digits_that_are_needed(finding: Finding, expected: str) -> None:
    assert shown(finding) == expected


def test_missing_runs_and_settings_are_told() -> None:
    scale = PartScale(1, lrs=(1e-3, 1e-2), seeds=(0, 1))
    part = Part("n", "p", "Why?", {"cpu": scale}, arms={"none": ()}, settings={"small": ("model.d_model=64",)})
    runs = [dataclasses.replace(run("none", lr, seed, 2.0), setting="small") for lr in (1e-3, 1e-2) for seed in (0, 1)]

    def text(found: list[KeptRun]) -> str:
        return page(Reproduction("n", "it", ("p",), {"p": part}, {}), {("p", "cpu"): PartEvidence(HEAD, tuple(found))})

    assert "Settings: small is model.d\\_model=64." in text(runs)
    assert rows(text(runs), "| arm | lr | seeds")[0].startswith("| none@small | 0.001 | 2 |")
    assert "Incomplete" not in text(runs)
    assert "**Incomplete: 3 of 4 runs have a result.**" in text(runs[:3])


def test_a_mean_of_fewer_runs_says_so(text: str) -> None:
    assert rows(text, "| arm | lr | seeds")[1].startswith("| none | 0.01 | 3 | 1 | 2.45 \\[1.81, 3.09\\] of 2 |")


def test_claims_name_their_notes_and_units() -> None:
    part = Part("n", "p", "Why?", {"cpu": PartScale(1)}, arms={"a": (), "b": ()})
    test = {"kind": "difference", "a": "a", "b": "b", "direction": -1}
    notes = (("One.",), ("Two.", "One."))
    claims = [
        Claim(f"n-{i}", ("p",), "less", {"text": "t"}, {"loss": "less"}, test, caveats=c) for i, c in enumerate(notes)
    ]
    found = [Finding("x", -0.5, -0.6, -0.4), Finding("not run yet")]
    table = claim_table(part, "cpu", [Decided(*pair) for pair in zip(claims, found, strict=True)])
    assert [row[0] for row in table.rows] == ["less [1]", "less [2] [1]"]
    assert [row[2] for row in table.rows] == ["-0.5 [-0.6, -0.4] nats", "-"]
