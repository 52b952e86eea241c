"""The gallery's counts, tests and page, from evidence that is made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.statistics import fisher, share_interval
from stability_lab.reproduction.evidence import KeptRun, PartEvidence
from stability_lab.reproduction.remedies import draw, overview, page, remedies, sentences

HEAD = {"scale": "cpu", "date": "2026-12-01", "device": "cpu", "seconds": 5.0, "versions": {}, "git": None}


def run(arm: str, seed: int, symptom: bool, verdict: str = "stable", loss: float = 2.0) -> KeptRun:
    status = "diverged" if verdict == "diverged" else "completed"
    final = {"symptom": float(symptom), "val/loss": loss}
    record = RunRecord(Path(arm), {}, {}, {"status": status, "verdict": verdict, "final": final})
    return KeptRun(arm, "", None, seed, record)


@pytest.fixture(scope="module")
def gallery() -> dict[str, PartEvidence]:
    runs = [run("none", seed, True, "no_learning", 3.0) for seed in range(15)]
    runs += [run("qknorm", seed, False, loss=2.5 + 0.01 * seed) for seed in range(5)]
    runs += [run("softcap", seed, seed < 4) for seed in range(5)]
    runs += [run("postnorm", seed, False, "diverged") for seed in range(5)]
    head = HEAD | {"commands": ["train -m"], "excluded": {"perinorm": "both claim norm_placement"}}
    quiet = [run("none", seed, False, loss=2.0) for seed in range(15)]
    quiet += [run("qknorm", seed, seed < 5, loss=1.9 + 0.001 * seed) for seed in range(5)]
    return {"deep": PartEvidence(head, tuple(runs)), "calm": PartEvidence(HEAD | {"commands": []}, tuple(quiet))}


def test_a_remedy_is_a_symptom_that_is_gone_in_runs_that_learn(gallery: dict[str, PartEvidence]) -> None:
    deep, calm = remedies(gallery).values()
    assert {arm: cell.verdict for arm, cell in deep.items()} == {
        "none": "",
        "qknorm": "cures",
        "softcap": "not told apart",
        "postnorm": "removes the symptom, fails otherwise",
        "perinorm": "cannot be combined",
    }
    assert (deep["softcap"].shown, deep["softcap"].runs, deep["postnorm"].failed) == (4, 5, 5)
    # Of four tests the three clearest are alike.
    assert deep["qknorm"].p == pytest.approx(4 * fisher((0, 5), (15, 15)))
    assert deep["qknorm"].loss is None  # no run without it learned
    assert calm["qknorm"].verdict == "worsens"
    assert calm["qknorm"].loss is not None
    assert calm["qknorm"].loss.value == pytest.approx(-0.098)


def test_the_table_the_sentences_and_the_page_say_the_same(gallery: dict[str, PartEvidence], tmp_path: Path) -> None:
    found = remedies(gallery)
    table = overview(found)
    assert table.header == ("stabilizer", "deep", "calm")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["none"] == ("15/15 x", "0/15")
    assert rows["qknorm"] == ("0/5 +", "5/5 -")
    assert rows["postnorm"] == ("0/5 +x", "")
    assert rows["perinorm"] == ("cannot", "")
    assert next(iter(rows)) == "none"
    assert (
        sentences(found)[0] == "deep: cured by qknorm; with postnorm the symptom is gone and most runs fail otherwise"
    )
    assert sentences(found)[1] == "calm: no stabilizer is shown to cure it"
    summaries = {"deep": "twelve blocks", "calm": "nothing"}
    text = page(gallery, summaries, "gallery/figures/gallery.png")
    assert text == page(gallery, summaries, "gallery/figures/gallery.png")
    assert "| softcap | 4 of 5 | 0.80 \\[0.28, 0.99\\] |" in text
    assert "- perinorm: both claim norm\\_placement" in text
    draw(gallery, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_exact_intervals_and_tests() -> None:
    assert share_interval(0, 5) == (0.0, pytest.approx(1 - 0.025 ** (1 / 5)))
    assert share_interval(5, 5) == (pytest.approx(0.025 ** (1 / 5)), 1.0)
    assert share_interval(4, 10) == pytest.approx((0.1216, 0.7376), abs=1e-4)  # a table of exact intervals
    assert fisher((0, 5), (15, 15)) == pytest.approx(1 / 15504)
    with pytest.raises(ValueError, match="6 of 5 is no share"):
        share_interval(6, 5)
