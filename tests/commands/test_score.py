"""The command `score`: the judge's answers on files, as table and as JSON, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab import cli
from stability_lab.judge.judgement import judge
from stability_lab.judge.log import Log
from stability_lab.judge.spikes import DEFINITIONS
from stability_lab.judge.verdict import Evidence
from stability_lab.logs import sources
from stability_lab.tracking.run_files import read_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> Path:
    folder = tmp_path_factory.mktemp("score")
    arguments = [*tiny_overrides, "trainer.max_steps=40", "diagnostics.probe_every=10"]
    assert cli.run(["train", *arguments, f"output_dir={folder}", "run_name=a"]) == 0
    return folder / "runs" / "a"


def write(folder: Path, loss: Any, norm: Any = None, *, stride: int = 1, name: str = "log.csv") -> Path:
    """A CSV of a loss and a gradient norm; None leaves a cell empty."""
    norm = [None] * len(loss) if norm is None else norm
    lines = ["step,loss,grad_norm"]
    for i, pair in enumerate(zip(loss, norm, strict=True)):
        lines.append(",".join([str(stride * (i + 1)), *("" if cell is None else repr(float(cell)) for cell in pair)]))
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def healthy(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    loss = 2 + 3 * np.exp(-np.arange(n) / 50) + rng.normal(0, 0.02, n)
    return loss, 0.5 + rng.normal(0, 0.02, n)


def blocks(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.run(["score", *map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def table(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.run(["score", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.run(["score", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    assert said.err.startswith("error: ")
    return said.err


def test_a_log_is_judged_as_the_judge_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, norm = healthy(400)
    loss[300] += 3
    norm[200] = math.inf
    (block,) = blocks(capsys, write(tmp_path, loss, norm))
    expected = judge(Log(step=np.arange(1, 401), loss=loss, grad_norm=norm)).as_dict()
    assert {key: block[key] for key in expected if key != "notes"} == {
        key: value for key, value in expected.items() if key != "notes"
    }
    assert set(expected["notes"]) <= set(block["notes"])
    assert (block["verdict"], block["first_bad_step"]) == ("stable", None)  # finite again, so it was skipped
    assert block["steps"] == {"first": 1, "last": 400, "values": 400, "stride": 1}
    assert set(block["scores"]) == {"loss", "grad_norm"}
    assert set(block["scores"]["loss"]) == set(DEFINITIONS)
    assert block["scores"]["loss"]["robust"]["steps"] == [301]
    assert block["scores"]["loss"]["olmo2"]["score"] is None
    assert "1000 finite ones" in block["scores"]["loss"]["olmo2"]["reason"]


def test_a_run_of_ours_gives_what_its_summary_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(capsys, run)
    assert block["format"] == "run folder"
    rows = read_rows(run / "metrics.jsonl")
    summary, manifest = (json.loads((run / f"{name}.json").read_text("utf-8")) for name in ("summary", "manifest"))
    log = Log(
        **{key: np.array([row[name] for row in rows]) for key, name in (("step", "step"), ("loss", "train/loss"))},
        grad_norm=np.array([row["optim/grad_norm"] for row in rows]),
        lr=np.array([row["optim/lr"] for row in rows]),
        tokens=np.array([row["tokens"] for row in rows]),
        skipped=np.array([row["optim/skipped"] > 0 for row in rows]),
        max_attn_logit=np.array([row.get("attn/max_logit", math.nan) for row in rows]),
        log_z=np.array([row["train/log_z_mean"] for row in rows]),
    )
    data = manifest["data"]
    evidence = Evidence(
        initial_val_loss=summary["initial"]["val/loss"],
        final_val_loss=summary["final"]["val/loss"],
        unigram_entropy=data["unigram_entropy"],
        vocab_size=data["vocab_size"],
        warmup_steps=2,
        own=True,
    )
    expected = judge(log, evidence).as_dict()
    assert {key: block[key] for key in expected} == expected
    for key in ("verdict", "reason", "first_bad_step"):
        assert block[key] == summary[key]


def test_the_metrics_file_of_a_run_gives_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = blocks(capsys, run, run / "metrics.jsonl")
    (note,) = file.pop("notes")
    assert note == f"This log equals that of {run}: they are one run."
    assert {**file, "file": folder["file"], "notes": []} == folder


def test_a_log_that_equals_a_run_of_another_file_names_the_run(tmp_path: Path, capsys) -> None:
    rows = [f"{run},{i},{3 - 0.01 * i - 0.1 * (run == 's2')}\n" for i in range(50) for run in ("s1", "s2")]
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("run,step,loss\n" + "".join(rows), encoding="utf-8")
    *_, last = blocks(capsys, tmp_path / "a.csv", tmp_path / "b.csv")
    assert f"This log equals that of {tmp_path / 'a.csv'}, run s2: they are one run." in last["notes"]


def test_a_killed_run_is_judged_by_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "summary.json").write_text('{"status": "running"}', encoding="utf-8")
    assert blocks(capsys, copy)[0]["verdict"] in ("no_learning", "stable")
    (copy / "manifest.json").write_text('{"data": [', encoding="utf-8")
    assert any("own facts, which cannot be read" in note for note in blocks(capsys, copy)[0]["notes"])
    (copy / "config.yaml").unlink()
    (copy / "manifest.json").write_text("[]", encoding="utf-8")
    assert any("own facts, which cannot be read" in note for note in blocks(capsys, copy)[0]["notes"])


def test_a_strange_initial_loss_is_warned_of(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    summary = json.loads((copy / "summary.json").read_text(encoding="utf-8"))
    summary["initial"]["val/loss"] = 40.0
    (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert "note      The loss before training is 40.000 nats, far above ln(" in table(capsys, copy)


def test_a_short_healthy_log_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, norm = healthy(500)
    shown = table(capsys, write(tmp_path, loss, norm))
    assert "verdict   stable. " in shown
    assert shown.count("undefined: a value is scored against the 1000 finite ones before it") == 2
    assert "  no event" in shown
    assert "steps 1 to 500, one every step" in shown


def test_strides_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, _ = healthy(60)
    file = write(tmp_path, loss, stride=25)
    (block,) = blocks(capsys, file)
    assert block["steps"] == {"first": 25, "last": 1500, "values": 60, "stride": 25}
    assert any("every 25 steps" in note for note in block["notes"])
    assert "one every 25 steps" in table(capsys, file)


def test_rows_and_epochs_are_not_called_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"{{'loss': {3 - 0.01 * i}, 'learning_rate': 5e-05, 'epoch': {i / 100}}}\n" for i in range(50))
    (tmp_path / "train.out").write_text(lines, encoding="utf-8")
    assert "rows 1 to 50, one every row" in table(capsys, tmp_path / "train.out")
    keras = "epoch,loss\n" + "".join(f"{i},{3 - 0.01 * i}\n" for i in range(50))
    (tmp_path / "keras.csv").write_text(keras, encoding="utf-8")
    assert "epochs 0 to 49, one every epoch" in table(capsys, tmp_path / "keras.csv")


@pytest.mark.parametrize(
    ("steps", "gaps", "words"),
    [
        ([*range(1, 200), *range(900, 1100)], (1, [199, 900]), "one every step but for a gap from 199 to 900"),
        ([*range(1, 101), *range(102, 201)], (1, [100, 102]), "one every step but for a gap from 100 to 102"),
        (
            [*range(10, 500, 10), *range(600, 900, 10), *range(920, 1500, 10)],
            (2, [490, 600]),
            "one every 10 steps but for 2 gaps, the widest from 490 to 600",
        ),
    ],
)
@pytest.mark.parametrize("metric", [True, False])
def test_gaps_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list[int], gaps: Any, words: str, metric: bool
) -> None:
    loss, _ = healthy(len(steps))
    file = tmp_path / "a.csv"
    file.write_text("step,loss\n" + "".join(f"{t},{v}\n" for t, v in zip(steps, loss, strict=True)), encoding="utf-8")
    options = ["--metric", "loss"] if metric else []
    (block,) = blocks(capsys, file, *options)
    assert block["steps"]["gaps"] == {"number": gaps[0], "widest": gaps[1]}
    assert f"steps {steps[0]} to {steps[-1]:,}, {words}\n" in table(capsys, file, *options)


def test_signals_that_are_logged_at_different_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, norm = healthy(300)
    norm[250:] = math.nan
    every_tenth = [value if i % 10 == 9 else None for i, value in enumerate(loss)]
    (block,) = blocks(capsys, write(tmp_path, every_tenth, norm))
    assert (block["verdict"], block["first_bad_step"]) == ("diverged", 251)
    assert set(block["sensitivity"].values()) == {"diverged"}
    assert block["scores"]["grad_norm"]["robust"]["n_nonfinite"] == 50
    assert block["scores"]["loss"]["robust"]["n_scored"] == 10
    assert [event["event"] for event in block["events"]] == ["nonfinite_step"]
    assert any(note.startswith("loss: One value every 10 steps") for note in block["notes"])
    assert block["steps"]["values"] == 300
    assert not any("The log has no" in note for note in block["notes"])


def test_a_missing_cell_doubles_no_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step without a target has no gradient norm; all else stands at the same steps."""
    rows = [
        {"step": i, "train/loss": 2.0 + 0.01 * (i % 3), "optim/grad_norm": 1.0, "optim/skipped": float(i == 50)}
        for i in range(1, 131)
    ]
    del rows[49]["optim/grad_norm"]
    rows[69] |= {"attn/max_logit": 2e3}
    rows[99] |= {"train/loss": math.nan}
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (block,) = blocks(capsys, file)
    assert [(event["event"], event["step"]) for event in block["events"]] == [
        ("skipped_step", 50),
        ("attention_logit_alert", 70),
        ("nonfinite_step", 100),
    ]


@pytest.mark.slow
def test_faults_of_a_run_are_told_once(
    tmp_path: Path, tiny_overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny_overrides, "trainer.max_steps=40", "diagnostics.probe_every=10", "debug.inject=all_ignored@20"]
    assert cli.run(["train", *arguments, f"output_dir={tmp_path}", "run_name=a"]) == 0
    (block,) = blocks(capsys, tmp_path)
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text(encoding="utf-8"))
    assert dict(Counter(event["event"] for event in block["events"])) == summary["events"]
    assert summary["events"]["skipped_step"] == 1
    assert (block["verdict"], block["reason"]) == (summary["verdict"], summary["reason"])
    assert block["notes"] == summary["notes"]


def test_several_runs_are_several_blocks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = Path(shutil.copytree(run, tmp_path / "runs" / "b"))
    first = Path(shutil.copytree(run, tmp_path / "runs" / "a"))
    found = blocks(capsys, tmp_path)
    assert [block["file"] for block in found] == [str(first), str(second)]
    assert len({json.dumps({**block, "file": "", "notes": []}) for block in found}) == 1
    export = tmp_path / "export.csv"
    export.write_text("Step,a - train/loss,b - train/loss\n1,2,3\n2,1.9,2.9\n", encoding="utf-8")
    assert [block["run"] for block in blocks(capsys, export)] == ["a", "b"]
    assert [block["run"] for block in blocks(capsys, export, "--metric", "train/loss")] == ["a", "b"]
    assert f"{export}, run b" in table(capsys, export)


def test_what_only_the_user_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = np.r_[np.linspace(4.0, 2.0, 100), np.linspace(2.0, 3.6, 100)]
    file = write(tmp_path, loss)
    (block,) = blocks(capsys, file)
    assert block["verdict"] == "diverged"
    assert block["sensitivity"] == {"0.5": "diverged", "1": "diverged", "2": "undecided"}
    assert "warming up" not in block["reason"]
    assert "warming up" in blocks(capsys, file, "--warmup-steps", 200)[0]["reason"]
    assert blocks(capsys, file, "--initial-loss", 2.1)[0]["reason"].startswith("The loss ended at 3.6")
    flat = write(tmp_path, 5.6 + 1e-3 * (loss % 0.01), name="flat.csv")
    assert "ln(256)" in blocks(capsys, flat, "--vocab-size", 256)[0]["reason"]
    for option, value in (
        ("--warmup-steps", -1),
        ("--vocab-size", 1),
        ("--initial-loss", "nan"),
        ("--initial-loss", 0),
    ):
        assert option in refusal(capsys, file, option, value)


def test_spikes_that_several_logs_share_are_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for seed in range(3):
        loss, _ = healthy(1000, seed=seed)
        loss[[300, 700, 900]] += 0.6
        loss[400 + 100 * seed] += 0.6  # and one of its own
        files.append(write(tmp_path, loss, name=f"{seed}.csv"))
    shown = table(capsys, *files)
    assert "3 spikes at the same step in up to 3 of 3 logs, more than chance would make: 301, 701, 901" in shown
    assert "look at it" in shown
    for block in blocks(capsys, *files):
        assert block["shared_spikes"] == [{"step": step, "runs": 3, "of": 3} for step in (301, 701, 901)]
        assert [event["cause"] for event in block["events"] if event["event"] == "loss_spike"].count("batch") == 3
        assert "with 1 spike," in block["reason"]
    assert "same step" not in table(capsys, files[0])


def test_one_definition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, *healthy(200))
    (block,) = blocks(capsys, file, "--definition", "olmo_core")
    assert {signal: list(named) for signal, named in block["scores"].items()} == {
        "grad_norm": ["olmo_core"],
        "loss": ["olmo_core"],
    }
    assert cli.run(["score", str(file), "--definition", "olmo3"]) == 2


def test_one_metric_has_scores_and_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, norm = healthy(300)
    norm[200] = 9.0
    file = write(tmp_path, loss, norm)
    (block,) = blocks(capsys, file, "--metric", "grad_norm")
    assert list(block["scores"]) == ["grad_norm"]
    assert block["scores"]["grad_norm"]["robust"]["steps"] == [201]
    assert not {"verdict", "events"} & block.keys()
    assert "verdict" not in table(capsys, file, "--metric", "grad_norm")
    assert "--metric=nothing" in refusal(capsys, file, "--metric", "nothing")
    assert "leave out --loss" in refusal(capsys, file, "--metric", "loss", "--loss", "loss")


def test_many_events_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, _ = healthy(1500)
    loss[300::40] += 2
    file = write(tmp_path, loss)
    (block,) = blocks(capsys, file)
    n = len(block["events"])
    assert n == 30
    shown = table(capsys, file)
    assert f"  {n} events: {n} loss_spike" in shown
    assert f"  and {n - 20} later ones: --format json has all" in shown
    assert shown.count("loss up to") == 20 + 1  # and once in the verdict's reason


def test_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path, *healthy(150), name="a.csv")
    second = write(tmp_path, *healthy(150, seed=1), name="b.csv")
    assert [block["file"] for block in blocks(capsys, first, second)] == [str(first), str(second)]
    assert table(capsys, first, second).count("verdict   ") == 2


def test_a_log_that_cannot_be_read_keeps_no_other_from_its_score(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, empty, missing = write(tmp_path, *healthy(150)), tmp_path / "b.csv", tmp_path / "c.csv"
    empty.write_text("", encoding="utf-8")
    assert cli.run(["score", str(empty), str(good), str(missing)]) == 2
    said = capsys.readouterr()
    assert said.out.count("verdict   stable") == 1
    assert f"{empty}\n  error     {empty} is empty" in said.out
    assert f"{missing}\n  error     {missing}: no such file" in said.out
    assert said.err == "error: 2 of 3 logs cannot be scored: their blocks say why\n"
    assert cli.run(["score", str(empty), str(good), "--format", "json", "--metric", "loss"]) == 2
    scored, refused = json.loads(capsys.readouterr().out)
    assert (scored["file"], refused) == (str(good), {"file": str(empty), "error": f"{empty} is empty"})
    # One damaged run of a sweep, likewise.
    for name in ("a", "b"):
        shutil.copytree(run, tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "a" / "metrics.jsonl").write_text("", encoding="utf-8")
    assert cli.run(["score", str(tmp_path / "sweep")]) == 2
    said = capsys.readouterr()
    assert f"{tmp_path / 'sweep' / 'a' / 'metrics.jsonl'} is empty" in said.out
    assert said.out.count("verdict   ") == 1


def test_a_folder_that_holds_too_much_is_not_looked_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MOST", 20)
    for i in range(30):
        (tmp_path / f"{i}.txt").touch()
    assert "holds more than 20 files and folders: give the folder of a run" in refusal(capsys, tmp_path)


def test_hostile_names_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a\x1b[2J\n.csv"
    file.write_text("step,x\x1b]0;title\x07\u202e,loss\n" + "1,1,2\n2,1,1\n", encoding="utf-8")
    shown = table(capsys, file, "--metric", "x\x1b]0;title\x07\u202e")
    assert "a\\x1b[2J\\n.csv" in shown
    assert "x\\x1b]0;title\\x07\\u202e" in shown
    said = refusal(capsys, file, "--loss", "y\x1b")
    assert not set(shown + said) & set("\x1b\x07\u202e")


def test_a_large_export_takes_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n = 50_000
    loss, norm = healthy(n)
    loss[[12_000, 12_001, 30_000]] += 1.5
    norm[[12_000, 30_000]] *= 20
    lines = ["_step,train/CrossEntropyLoss,optim/total_grad_norm,optim/learning_rate_group0,throughput/total_tokens"]
    lines += [f"{i + 1},{loss[i]:.5f},{norm[i]:.5f},0.0003,{(i + 1) * 4_194_304}" for i in range(n)]
    (tmp_path / "run.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    began = time.process_time()
    (block,) = blocks(capsys, tmp_path / "run.csv")
    assert time.process_time() - began < 20
    assert block["verdict"] == "stable"
    assert "2 spikes, back within 3 values: 0.04 per 1,000 values" in block["reason"]
    for signal, steps in (("loss", [12_001, 12_002, 30_001]), ("grad_norm", [12_001, 30_001])):
        for score in block["scores"][signal].values():
            assert set(steps) <= set(score["steps"])
            assert score["n_spikes"] <= len(steps) + 5
    assert block["events"][0]["lr"] == 3e-4
    assert block["events"][0]["tokens"] == 12_001 * 4_194_304


LIGHT = """
import sys
from stability_lab import cli
assert cli.run(["score", sys.argv[1]]) == 0
print([name for name in ("torch", "hydra", "omegaconf", "wandb", "datasets", "matplotlib") if name in sys.modules])
"""


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    file = write(tmp_path, *healthy(100))
    done = subprocess.run([sys.executable, "-c", LIGHT, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
