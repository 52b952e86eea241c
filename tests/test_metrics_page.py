"""docs/metrics.md names what runs write: every key of their files and every kind of event, and no other."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from stability_lab import cli
from stability_lab.judge import events as judge_events
from stability_lab.text import flatten
from stability_lab.tracking.run_files import read_rows

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
LONG = ("trainer.max_steps=120", "trainer.eval_every=50", "optimizer.lr=3e-3", "stability.stop_on_divergence=false")
PROBED = "+stabilizer=[attn_scale,qknorm,softcap,zloss]"
RUNS = {
    "spikes": [*LONG, PROBED, "debug.inject=[lr_spike@80x300,bad_batch@100]"],
    "skips": ["debug.inject=[all_ignored@3,nan_grad@6,nan_loss@8]", "stability.on_nonfinite=skip"],
    "repeats": ["debug.inject=bad_batch@4", "sampling.mask_repeats=true", "diagnostics.probe_every=3"],
    "warns": ["debug.inject=inf_loss@6", "stability.on_nonfinite=warn"],
    "stops": ["debug.inject=nan_grad@6"],
    "diverges": ["trainer.max_steps=60", "debug.inject=lr_spike@40x3000"],
    "synthetic": ["data=synthetic"],
    "pairs": ["model=bert_mini", "objective=masked_lm_nsp"],
    "resumed": ["trainer.max_steps=8", "debug.inject=raise@7"],
}
CODES = {"stops": 3, "diverges": 3, "resumed": 1}


def section(title: str) -> str:
    (found,) = re.findall(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return found[1]


def named(text: str) -> list[str]:
    """What the first column of all tables names; `L00` is any layer."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [re.sub(r"L00$", "L[0-9][0-9]", name) for cell in cells for name in re.findall(r"`(.*?)`", cell)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("page")
    always = [*tiny_overrides, f"output_dir={folder}", "trainer.max_steps=12", "trainer.checkpoint_every=3"]
    for name, words in RUNS.items():
        assert cli.run(["train", *always, f"run_name={name}", *words]) == CODES.get(name, 0), name
    failed = json.loads((folder / "runs" / "resumed" / "summary.json").read_text(encoding="utf-8"))
    assert cli.run(["train", f"resume={folder / 'runs' / 'resumed'}"]) == 0
    found: dict[str, dict[str, Any]] = {"failed": {"rows": [], "events": [], "summary": failed}}
    for name in RUNS:
        run = folder / "runs" / name
        rows, events = (read_rows(run / file) for file in ("metrics.jsonl", "events.jsonl"))
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        found[name] = {"rows": list(rows), "events": list(events), "summary": summary}
    return found


def assert_same(written: set[str], told: list[str]) -> None:
    unknown = {key for key in written if not any(fnmatchcase(key, name) for name in told)}
    absent = {name for name in told if not any(fnmatchcase(key, name) for key in written)}
    assert not unknown, f"docs/metrics.md does not name {sorted(unknown)}"
    assert not absent, f"docs/metrics.md names {sorted(absent)}, which no run wrote"


def test_every_column_of_metrics(runs: dict[str, dict[str, Any]]) -> None:
    always, sometimes = named(section("In every line")), named(section("In some lines"))
    assert_same({key for run in runs.values() for row in run["rows"] for key in row}, [*always, *sometimes])
    for name, run in runs.items():
        expected = set(always) - (set() if name == "spikes" else {"train/z_loss"})
        expected -= {"train/ppl"} if name == "pairs" else {"train/masked_ppl", "train/nsp_loss", "train/nsp_accuracy"}
        assert all(expected <= row.keys() for row in run["rows"]), name


def test_every_key_and_kind_of_events(runs: dict[str, dict[str, Any]]) -> None:
    events = [event for run in runs.values() for event in run["events"]]
    table, kinds = section("events.jsonl").split("| `event` | meaning |")
    keys = set(named(table))
    assert all(event.keys() == keys for event in events)
    told = set(named(kinds))
    assert {event["event"] for event in events} <= told
    source = Path(judge_events.__file__).read_text(encoding="utf-8")
    assert told >= judge_events.SPIKES | judge_events.DRIFTS | judge_events.STANDSTILLS
    assert all(f'"{kind}"' in source or kind in judge_events.SPIKES for kind in told)
    seen = {event["event"] for event in events}
    assert seen >= {"loss_spike", "grad_norm_spike", "lr_spike", "nonfinite_step", "skipped_step"}


def test_every_key_of_summaries(runs: dict[str, dict[str, Any]]) -> None:
    table, scores = section("summary.json"), section("Spike scores")
    written: set[str] = set()
    for run in runs.values():
        summary = dict(run["summary"])
        for signal in summary.pop("scores", {}).values():
            for rule in signal.values():
                assert rule.keys() == set(named(scores))
        written |= {re.sub(r"^sensitivity\..*", "sensitivity", key) for key in flatten(summary, ".")}
    told = [name for name in named(table) if not name.startswith("scores.")]
    assert_same(written - {"events", "initial", "final", "best"}, told)


def test_what_the_page_says_of_steps_that_were_not_judged(runs: dict[str, dict[str, Any]]) -> None:
    empty, bad_gradient, bad_loss = (runs["skips"]["rows"][step - 1] for step in (3, 6, 8))
    assert (empty["train/loss"], empty["train/ppl"], empty["optim/grad_norm"]) == (None, None, 0)
    assert (empty["optim/clip_coef"], empty["train/z_raw"], empty["train/log_z_max"]) == (1, 0, 0)
    assert empty["optim/skipped"] == bad_gradient["optim/skipped"] == bad_loss["optim/skipped"] == 1
    assert bad_gradient["train/loss"] > 0
    assert all(
        str(row[key]) == "nan" for row in (bad_gradient, bad_loss) for key in ("optim/grad_norm", "optim/clip_coef")
    )
    assert [event["event"] for event in runs["skips"]["events"]] == ["skipped_step"] * 3
    assert runs["skips"]["summary"]["skipped_steps"] == 3
    assert runs["warns"]["rows"][5]["optim/skipped"] == 0
    assert [event["event"] for event in runs["warns"]["events"]] == ["nonfinite_step"]
    assert [row["step"] for row in runs["resumed"]["rows"]] == list(range(1, 9))
