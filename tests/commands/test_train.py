"""The command `train` from its words to its files, its output and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from safetensors.torch import load_file

from stability_lab import __version__, cli
from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import from_plain
from stability_lab.tracking.manifest import fingerprint
from stability_lab.tracking.run_files import read_rows
from stability_lab.training.step import TrainStep

FILES = {"config.yaml", "manifest.json", "metrics.jsonl", "events.jsonl", "summary.json", "train.log", "checkpoints"}
IN_EVERY_ROW = {
    "step",
    "tokens",
    "train/loss",
    "train/ppl",
    "train/z_loss",
    "train/z_raw",
    "train/log_z_mean",
    "train/log_z_max",
    "optim/lr",
    "optim/grad_norm",
    "optim/clip_coef",
    "attn/logit_bound",
}
MEASURED = {"val/loss", "val/ppl", "attn/max_logit", "attn/max_abs_logit", "attn/max_logit/L01", "attn/entropy/L01"}


class Shown(NamedTuple):
    code: int
    out: str
    err: str


def train(*arguments: str) -> Shown:
    out, err = io.StringIO(), io.StringIO()
    log = logging.getLogger("stability_lab")
    before = log.handlers, log.level, log.propagate
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(["train", *arguments])
    finally:
        log.handlers, log.level, log.propagate = before
    return Shown(code, out.getvalue(), err.getvalue())


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def only(folder: Path) -> Path:
    (path,) = (p for p in folder.iterdir() if p.is_dir())
    return path


def last_words(out: str) -> dict[str, str]:
    """The lines of the report at the end, by their first words."""
    words = ("status", "verdict", "train", "validation", "grad-norm spikes", "largest attention logit", "speed")
    lines = [line for line in out.splitlines() if not line.startswith(("next: ", "to go on: "))][-9:]
    found = {word: line[len(word) :].strip() for line in lines for word in words if line.startswith(word + " ")}
    assert list(found) == list(words), out
    assert lines[-2].startswith("files ")
    assert lines[-1].startswith("W&B ")
    return {**found, "files": lines[-2][5:].strip(), "W&B": lines[-1][3:].strip()}


# One run


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a folder") / "outputs"


@pytest.fixture(scope="module")
def shown(output: Path, tiny_overrides: tuple[str, ...]) -> Shown:
    """A run of two stabilizers that ends well."""
    return train(*tiny_overrides, "+stabilizer=[zloss,qknorm]", "seed=1", f"output_dir='{output}'")


@pytest.fixture(scope="module")
def run(output: Path, shown: Shown) -> Path:
    assert shown.code == 0, shown
    return only(output / "runs")


def test_a_run_leaves_exactly_its_files(run: Path, output: Path) -> None:
    assert {path.name for path in run.iterdir()} == FILES
    assert sorted(p.relative_to(run / "checkpoints").as_posix() for p in (run / "checkpoints").rglob("*.*")) == [
        "best/model.safetensors",
        "best/state.json",
        "last/model.safetensors",
        "last/state.json",
        "last/training.safetensors",
    ]
    assert [path.name for path in output.iterdir()] == ["runs"]
    assert run.name.startswith("qknorm-zloss_")
    assert run.name.endswith("_" + read(run / "manifest.json")["fingerprint"][:8])


def test_the_first_line_names_the_stabilizers(shown: Shown) -> None:
    assert shown.out.splitlines()[0] == "stabilizers: qknorm, zloss"
    assert shown.err == ""


def test_the_last_lines_say_what_came_out(shown: Shown, run: Path) -> None:
    summary = read(run / "summary.json")
    report = last_words(shown.out)
    assert report["status"] == "completed (exit code 0)"
    assert report["verdict"] == f"{summary['verdict']}: {summary['reason']}"
    final = summary["final"]
    assert report["train"].startswith(f"loss {final['train/loss']:.3f}, perplexity {final['train/ppl']:.3g} (mean")
    first = summary["initial"]
    assert report["validation"] == (
        f"loss {first['val/loss']:.3f} -> {final['val/loss']:.3f}, "
        f"perplexity {first['val/ppl']:.3g} -> {final['val/ppl']:.3g}"
    )
    assert report["grad-norm spikes"].startswith("0 events; not scored: ")
    assert report["largest attention logit"].startswith(f"{summary['max_attn_logit']:.4g}")
    assert report["speed"] == f"{summary['tokens_per_s']:,.0f} tokens/s"
    assert report["files"] == str(run)
    assert report["W&B"] == "not recorded for W&B"


def test_config_is_resolved_and_reads_back(run: Path, output: Path, tiny_overrides: tuple[str, ...]) -> None:
    text = (run / "config.yaml").read_text(encoding="utf-8")
    assert "${" not in text
    plain = yaml.safe_load(text)
    arguments = [*tiny_overrides, "+stabilizer=[zloss,qknorm]", "seed=1", f"output_dir='{output}'"]
    (composed,) = compose_jobs(read_command_line(arguments))
    assert plain == composed.plain
    assert from_plain(plain) == composed.config
    assert fingerprint(plain, __version__) == read(run / "manifest.json")["fingerprint"]


def test_manifest_says_where_the_run_came_from(run: Path) -> None:
    manifest = read(run / "manifest.json")
    assert manifest["versions"]["stability_lab"] == __version__
    assert {"python", "torch", "numpy", "hydra-core"} <= set(manifest["versions"])
    assert manifest["run"] == run.name
    assert "+stabilizer=[qknorm,zloss]" in manifest["overrides"]
    assert manifest["group"] == "runs"
    assert manifest["stabilizers"] == ["qknorm", "zloss"]
    assert manifest["seams"] == {"loss_terms": ["zloss"], "qk_transform": ["qknorm"]}
    assert manifest["attention"]["backend"] == "sdpa"
    assert manifest["device"] == "cpu"
    assert manifest["parameters"]["total"] > manifest["parameters"]["non_embedding"] > 0
    assert {"sha256", "fingerprint", "train_tokens", "first_batch", "last_batch", "validation"} <= set(manifest["data"])
    assert manifest["init"]
    assert manifest["notices"] == []
    assert {"platform", "created", "git", "argv", "overrides", "threads", "precision"} <= set(manifest)


def test_metrics_have_one_line_a_step(run: Path) -> None:
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["tokens"] for row in rows] == [64 * step for step in range(1, 6)]
    for row in rows:
        assert set(row) >= IN_EVERY_ROW
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/ppl"] == pytest.approx(math.exp(row["train/loss"]))
        assert row["train/z_loss"] == pytest.approx(1e-4 * row["train/z_raw"])
    assert MEASURED | {"perf/tokens_per_s"} <= set(rows[-1])
    assert not any(MEASURED & set(row) for row in rows[:-1])
    assert rows[-1]["attn/max_logit"] <= rows[-1]["attn/max_abs_logit"]
    # Warm-up to the peak of 1e-2 in two steps, then down.
    assert [row["optim/lr"] for row in rows[:2]] == pytest.approx([5e-3, 1e-2])
    assert rows[-1]["optim/lr"] < 1e-2


def test_summary_agrees_with_the_metrics(run: Path) -> None:
    rows, summary = read_rows(run / "metrics.jsonl"), read(run / "summary.json")
    assert (summary["status"], summary["exit_code"], summary["steps"], summary["tokens"]) == ("completed", 0, 5, 320)
    assert summary["final"]["val/loss"] == rows[-1]["val/loss"]
    assert summary["final"]["val/loss"] < summary["initial"]["val/loss"]
    assert summary["final"]["train/loss"] == pytest.approx(sum(row["train/loss"] for row in rows) / 5)
    assert summary["best"] == {"val/loss": rows[-1]["val/loss"], "val/ppl": rows[-1]["val/ppl"], "step": 5}
    assert summary["max_attn_logit"] == max(rows[-1]["attn/max_logit"], summary["initial"]["attn/max_logit"])
    assert summary["scores"]["grad_norm"]["olmo_core"]["score"] is None
    assert "128" in summary["scores"]["grad_norm"]["olmo_core"]["reason"]
    assert summary["first_bad_step"] is None
    assert 0 <= summary["clip_fraction"] <= 1


def test_train_log_keeps_what_was_shown(run: Path, shown: Shown) -> None:
    log = (run / "train.log").read_text(encoding="utf-8")
    *lines, after = shown.out.splitlines()
    for line in lines:
        assert line in log
    assert shlex.split(after) == ["next:", "python", "-m", "stability_lab", "score", str(run)]


@pytest.mark.slow
def test_the_same_command_again_makes_a_second_run(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    for _ in range(2):
        assert train(*tiny_overrides).code == 0
    first, second = sorted((here / "outputs" / "runs").iterdir())
    assert second.name == f"{first.name}-2"
    losses = [
        [(r["train/loss"], r["optim/grad_norm"]) for r in read_rows(p / "metrics.jsonl")] for p in (first, second)
    ]
    assert losses[0] == losses[1]
    assert read(first / "manifest.json")["fingerprint"] == read(second / "manifest.json")["fingerprint"]


def test_if_exists(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    tiny = (*tiny_overrides, "trainer.max_steps=1", "run_name=mine", "group=trial")
    assert train(*tiny).code == 0
    folder = here / "outputs" / "trial"
    before = stamps(folder)

    skipped = train(*tiny, "if_exists=skip")
    assert skipped.code == 0
    assert "already finished: skipped" in skipped.out
    refused = train(*tiny, "if_exists=error")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: if_exists=error: ")
    assert len(refused.err.splitlines()) == 1
    assert stamps(folder) == before

    assert train(*tiny, "if_exists=overwrite").code == 0
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert stamps(folder) != before

    (folder / "mine" / "config.yaml").unlink()
    before = stamps(folder)
    refused = train(*tiny, "if_exists=overwrite")
    assert refused.code == 2
    assert refused.err.startswith("error: if_exists=overwrite: ")
    assert stamps(folder) == before


def stamps(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("sweep", [(), ("-m",)])
def test_an_output_folder_that_cannot_be_made(
    here: Path, tiny_overrides: tuple[str, ...], sweep: tuple[str, ...]
) -> None:
    (here / "file").write_text("", encoding="utf-8")
    refused = train(*sweep, *tiny_overrides, "output_dir=file/outputs")
    assert refused.code == 2
    assert refused.err.startswith("error: output_dir")
    assert "file/outputs" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert refused.out == ""


def test_tracking_local_needs_no_wandb(
    here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "datasets", "matplotlib", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    assert train(*tiny_overrides, "trainer.max_steps=1").code == 0


def test_a_warmup_longer_than_the_run_is_cut_with_a_notice(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    shown = train(*tiny_overrides, "schedule.warmup_steps=30")
    assert shown.code == 0
    notice = "schedule.warmup_steps=30 is longer than the run and cut to its 5 steps"
    run = only(here / "outputs" / "runs")
    assert shown.out.splitlines().count(f"notice: {notice}") == 1
    assert read(run / "manifest.json")["notices"] == [notice]
    rows = read_rows(run / "metrics.jsonl")
    assert [row["optim/lr"] for row in rows] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 1e-2])


# Runs that end badly


def test_a_diverged_run(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    shown = train(*tiny_overrides, "optimizer.lr=1e30")
    assert shown.code == 3
    assert last_words(shown.out)["status"] == "diverged (exit code 3)"
    run = only(here / "outputs" / "runs")
    summary = read(run / "summary.json")
    assert (summary["status"], summary["verdict"], summary["exit_code"]) == ("diverged", "diverged", 3)
    rows = read_rows(run / "metrics.jsonl")
    assert summary["first_bad_step"] == rows[-1]["step"] == len(rows) < 5
    assert "NaN" in (run / "metrics.jsonl").read_text(encoding="utf-8")
    assert not math.isfinite(rows[-1]["train/loss"])
    assert "val/loss" not in summary["final"]
    (event,) = read_rows(run / "events.jsonl")
    assert (event["event"], event["step"]) == ("nonfinite_step", rows[-1]["step"])
    for weights in load_file(run / "checkpoints" / "last" / "model.safetensors").values():
        assert weights.isfinite().all()


def stop_at(call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `error` in the given call of the training step, counted over all runs."""
    calls = iter(range(1, 1000))
    step = TrainStep.__call__

    def stopping(self: TrainStep, *arguments: Any) -> Any:
        if next(calls) == call:
            raise error
        return step(self, *arguments)

    monkeypatch.setattr(TrainStep, "__call__", stopping)


def test_a_failed_run(here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(4, RuntimeError("the device is\non fire"), monkeypatch)
    shown = train(*tiny_overrides)
    assert shown.code == 1
    assert "failed: RuntimeError: the device is (traceback in " in shown.out
    assert "Traceback" not in shown.out + shown.err
    run = only(here / "outputs" / "runs")
    log = (run / "train.log").read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in log
    assert "on fire" in log
    summary = read(run / "summary.json")
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert summary["ended_by"] == "RuntimeError: the device is"
    assert (summary["verdict"], summary.get("sensitivity")) == (None, None)
    assert last_words(shown.out)["verdict"].startswith("none: The run failed, ")
    assert len(read_rows(run / "metrics.jsonl")) == summary["steps"] == 3


def test_ctrl_c_in_a_step(here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(4, KeyboardInterrupt(), monkeypatch)
    shown = train(*tiny_overrides)
    assert shown.code == 130
    assert last_words(shown.out)["status"] == "interrupted (exit code 130)"
    run = only(here / "outputs" / "runs")
    summary = read(run / "summary.json")
    assert (summary["status"], summary["exit_code"], summary["ended_by"]) == ("interrupted", 130, "Ctrl-C")
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3]
    # It came in the middle of a step, so there is nothing sound to save; run/test_signals.py has the signal itself.
    assert not (run / "checkpoints").exists()


def test_ctrl_c_before_the_first_step(
    here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(1, KeyboardInterrupt(), monkeypatch)
    assert train(*tiny_overrides).code == 130
    summary = read(only(here / "outputs" / "runs") / "summary.json")
    assert (summary["status"], summary["steps"], summary["verdict"]) == ("interrupted", 0, None)


def test_ctrl_c_before_anything_was_measured(
    here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stability_lab.training.loop.validate", stopped)
    shown = train(*tiny_overrides)
    assert shown.code == 130
    assert "inf" not in last_words(shown.out)["largest attention logit"]
    summary = read(only(here / "outputs" / "runs") / "summary.json")
    assert (summary["status"], summary["steps"], summary["max_attn_logit"]) == ("interrupted", 0, None)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_signal_to_a_real_process(
    number: signal.Signals, code: int, tmp_path: Path, tiny_overrides: tuple[str, ...]
) -> None:
    arguments = [*tiny_overrides, "trainer.max_steps=1000000", "trainer.eval_every=null", "run_name=long"]
    run = tmp_path / "outputs" / "runs" / "long"
    process = subprocess.Popen(
        [sys.executable, "-m", "stability_lab", "train", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not ((run / "metrics.jsonl").exists() and len(read_rows(run / "metrics.jsonl")) >= 20):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err == ""
    assert last_words(out)["status"] == f"interrupted (exit code {code})"
    summary = read(run / "summary.json")
    assert (summary["status"], summary["exit_code"]) == ("interrupted", code)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, summary["steps"] + 1))
    assert (run / "checkpoints" / "last" / "model.safetensors").is_file()


# Sweeps


SWEEP = ("sweep.workers=1", "optimizer.lr=1e-3,1e30,2e-3", "--multirun")


def ended(folder: Path) -> list[dict[str, Any]]:
    """What the jobs of a sweep have written at their ends, in that order."""
    return [row for row in read_rows(folder / "jobs.jsonl") if row["event"] == "ended"]


@pytest.fixture(scope="module")
def sweep_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep") / "outputs"


@pytest.fixture(scope="module")
def sweep_shown(sweep_output: Path, tiny_overrides: tuple[str, ...]) -> Shown:
    """Three runs of which the second diverges."""
    return train(*tiny_overrides, *SWEEP, f"output_dir={sweep_output}")


@pytest.fixture(scope="module")
def sweep(sweep_shown: Shown, sweep_output: Path) -> Path:
    """The folder of the sweep."""
    assert sweep_shown.code == 0, sweep_shown
    return only(sweep_output)


def test_a_diverged_job_is_a_result(sweep: Path, sweep_shown: Shown) -> None:
    assert sweep.name.startswith("sweep_lr_")
    assert sweep_shown.err == ""
    assert len([path for path in sweep.iterdir() if path.is_dir()]) == 3
    jobs = sorted(ended(sweep), key=lambda job: job["job"])[:3]
    assert [(job["job"], job["status"], job["exit_code"]) for job in jobs] == [
        (1, "completed", 0),
        (2, "diverged", 3),
        (3, "completed", 0),
    ]
    for job in jobs:
        summary = read(Path(job["path"]) / "summary.json")
        assert (summary["status"], summary["verdict"]) == (job["status"], job["verdict"])
        assert job["val_loss"] == summary["final"].get("val/loss")
        manifest = read(Path(job["path"]) / "manifest.json")
        assert manifest["group"] == sweep.name
    assert "val/loss" in read(Path(jobs[2]["path"]) / "summary.json")["final"]


def test_a_sweep_ends_with_a_table(sweep: Path, sweep_shown: Shown) -> None:
    lines = sweep_shown.out.splitlines()
    assert lines[0] == f"sweep of 3 runs in {sweep}"
    assert sum(line.startswith("job ") and "stabilizers: none" in line for line in lines) == 3
    title, header, _, *table, after = lines[-7:]
    assert after == f"next: python -m stability_lab compare {sweep}"
    assert title == "3 runs: 2 completed, 1 diverged"
    assert header.split() == ["job", "status", "verdict", "val/loss", "time", "run"]
    assert [line.split()[:2] for line in table] == [["1", "completed"], ["2", "diverged"], ["3", "completed"]]
    assert all((sweep / line.split()[-1]).is_dir() for line in table)


def test_a_sweep_holds_its_runs_and_its_list(sweep: Path) -> None:
    assert {path.name for path in sweep.iterdir() if path.is_file()} - {"multirun.yaml"} == {"jobs.jsonl", "sweep.json"}
    for run in (path for path in sweep.iterdir() if path.is_dir()):
        assert {path.name for path in run.iterdir()} == FILES


def test_a_sweep_again_skips_what_is_finished(sweep: Path, sweep_output: Path, tiny_overrides: tuple[str, ...]) -> None:
    def of_runs() -> dict[str, int]:
        return {name: stamp for name, stamp in stamps(sweep).items() if "/" in name}

    before = of_runs()
    shown = train(*tiny_overrides, *SWEEP, f"output_dir={sweep_output}")
    assert shown.code == 0
    assert sum(", already there; " in line for line in shown.out.splitlines()) == 3
    assert of_runs() == before
    assert [line.split()[1] for line in shown.out.splitlines()[-4:-1]] == ["completed", "diverged", "completed"]


@pytest.mark.slow
def test_a_failed_job_does_not_stop_the_others(
    here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(3, RuntimeError("out of luck"), monkeypatch)
    shown = train("-m", "sweep.workers=1", *tiny_overrides, "trainer.max_steps=2", "+stabilizer=none,qknorm,zloss")
    assert shown.code == 1
    assert "Traceback" not in shown.out + shown.err
    folder = only(here / "outputs")
    jobs = ended(folder)
    assert [(job["status"], job["exit_code"]) for job in jobs] == [("completed", 0), ("failed", 1), ("completed", 0)]
    assert [job["verdict"] for job in jobs] == ["undecided", None, "undecided"]
    rows = [line.split() for line in shown.out.splitlines() if line.startswith(("1  ", "2  ", "3  "))]
    assert [row[1:3] for row in rows] == [["completed", "undecided"], ["failed", "-"], ["completed", "undecided"]]
    assert "Traceback" in (Path(jobs[1]["path"]) / "train.log").read_text(encoding="utf-8")
    assert "Traceback" not in (Path(jobs[2]["path"]) / "train.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_sweep_that_meets_a_run_and_must_not(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    """The second of two jobs wants the folder of the first; the third still runs."""
    arguments = (
        "-m",
        "sweep.workers=1",
        *tiny_overrides,
        "trainer.max_steps=1",
        "if_exists=error",
        "run_name=a,a,b",
        "group=mine",
    )
    shown = train(*arguments)
    assert (shown.code, shown.err) == (1, "")
    lines = [line for line in shown.out.splitlines() if "if_exists=error" in line]
    assert lines[0].startswith("job 2: error: if_exists=error: ")
    assert lines[-1].startswith("job 2 failed: if_exists=error: ")
    jobs = ended(here / "outputs" / "mine")
    assert [(job["status"], job["exit_code"]) for job in jobs] == [("completed", 0), ("failed", 2), ("completed", 0)]
    assert {path.name for path in (here / "outputs" / "mine").iterdir() if path.is_dir()} == {"a", "b"}


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_the_same_command_completes_it(
    here: Path, tiny_overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("-m", "sweep.workers=1", *tiny_overrides, "trainer.max_steps=2", "seed=0,1,2")
    with monkeypatch.context() as patch:
        stop_at(4, KeyboardInterrupt(), patch)
        shown = train(*arguments)
    assert shown.code == 130
    folder = only(here / "outputs")
    assert [job["status"] for job in ended(folder)] == ["completed", "interrupted"]

    again = train(*arguments)
    assert again.code == 0
    assert [job["skipped"] for job in ended(folder)[2:]] == [True, False, False]
    assert [job["status"] for job in ended(folder)[2:]] == ["completed"] * 3
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 3


@pytest.mark.slow
def test_a_value_of_another_job_is_one_notice(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    tuned = ("+stabilizer=none,zloss", "stabilizer.zloss.weight=1e-5")
    shown = train("-m", "sweep.workers=1", *tiny_overrides, "trainer.max_steps=1", "schedule.warmup_steps=0", *tuned)
    assert shown.code == 0
    notices = [line for line in shown.out.splitlines() if line.startswith("notice: ")]
    assert notices == ["notice: stabilizer.zloss.weight is ignored here: this run has no zloss"]
    none, zloss = sorted(path for path in only(here / "outputs").iterdir() if path.is_dir())
    assert yaml.safe_load((none / "config.yaml").read_text(encoding="utf-8"))["stabilizer"] == {}
    tuned_config = yaml.safe_load((zloss / "config.yaml").read_text(encoding="utf-8"))["stabilizer"]
    assert tuned_config["zloss"]["weight"] == 1e-5
    # The baseline is the same run in every sweep, so nothing that it does not have may enter its fingerprint.
    assert read(none / "manifest.json")["notices"] == [notices[0].removeprefix("notice: ")]
    assert read(zloss / "manifest.json")["notices"] == []
    alone = [*tiny_overrides, "trainer.max_steps=1", "schedule.warmup_steps=0", "trainer.threads=1"]
    (baseline,) = compose_jobs(read_command_line(alone))
    assert read(none / "manifest.json")["fingerprint"] == fingerprint(baseline.plain, __version__)


@pytest.mark.slow
def test_a_sweep_over_a_stabilizer_of_the_users_own(here: Path, tiny_overrides: tuple[str, ...]) -> None:
    folder = here / "my configs" / "stabilizer"
    folder.mkdir(parents=True)
    text = "strong_z:\n  _target_: stability_lab.stabilizers.zloss.ZLoss\n  weight: 1.0e-2\n"
    (folder / "strong_z.yaml").write_text(text, encoding="utf-8")
    arguments = (*tiny_overrides, "trainer.max_steps=1", "+stabilizer=none,[strong_z,qknorm]")
    shown = train("-m", *arguments, "--config-dir", str(folder.parent), "output_dir='out, of = here'")
    assert (shown.code, shown.err) == (0, "")
    jobs = sorted(ended(only(here / "out, of = here")), key=lambda job: job["job"])
    rows = [read_rows(Path(job["path"]) / "metrics.jsonl")[0] for job in jobs]
    assert "train/z_loss" not in rows[0]
    assert rows[1]["train/z_loss"] == pytest.approx(1e-2 * rows[1]["train/z_raw"])


# Real processes


@pytest.mark.slow
def test_the_console_script_from_another_folder(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    script = Path(sys.executable).with_name("stability-lab")
    arguments = ["train", "+stabilizer=rmsnorm", *tiny_overrides]
    done = subprocess.run([script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stabilizers: rmsnorm\n")
    assert {path.name for path in only(tmp_path / "outputs" / "runs").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> tuple[Path, str]:
    """A run with an offline mirror, from a process whose home has no W&B key; and what it printed."""
    folder = tmp_path_factory.mktemp("mirrored")
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    environment |= {"HOME": str(folder / "home"), "XDG_CONFIG_HOME": str(folder / "home")}
    (folder / "home").mkdir()
    arguments = ["+stabilizer=[qknorm,zloss]", *tiny_overrides, "tracking=wandb", "tracking.mode=offline"]
    arguments += ["group=mine"]
    done = subprocess.run(
        [sys.executable, "-m", "stability_lab", "train", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return only(folder / "outputs" / "mine"), done.stdout


def inspect(folder: Path, *options: str) -> str:
    """What wandb's own reader finds in an offline run."""
    wandb = Path(sys.executable).with_name("wandb")
    command = [wandb, "leet", "inspect", "--json", *options, folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_a_whole_run_in_wandbs_own_reader(mirrored: tuple[Path, str]) -> None:
    run, out = mirrored
    (files,) = (run / "wandb").glob("offline-run-*")
    hint = last_words(out)["W&B"]
    assert hint.startswith("wandb sync ")
    assert Path(hint.split()[-1]) == files

    state = json.loads(inspect(files, "--summary"))
    ours = read(run / "summary.json")
    assert state["run_id"] == read(run / "manifest.json")["tracker_id"]
    assert state["name"] == run.name
    assert state["tags"] == ["qknorm", "zloss", f"verdict:{ours['verdict']}"]
    assert state["exit_code"] == 0
    assert state["config"]["optimizer"]["lr"] == 0.01
    assert state["summary"]["verdict"] == ours["verdict"]
    final = state["summary"].get("final.val/loss", state["summary"].get("final", {}).get("val/loss"))
    assert final == pytest.approx(ours["final"]["val/loss"])

    text = inspect(files)
    records = [json.loads(line) for line in text.splitlines()]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [(row["step"], row["tokens"], row["train/loss"]) for row in history] == [
        (row["step"], row["tokens"], pytest.approx(row["train/loss"])) for row in read_rows(run / "metrics.jsonl")
    ]
    assert '"mine"' in text  # the group
    axes = [record["metric"] for record in records if record["type"] == "metric"]
    assert any(axis.get("step_metric") == "step" for axis in axes), axes


@pytest.mark.slow
def test_a_mirror_lies_inside_the_run(mirrored: tuple[Path, str]) -> None:
    run, _ = mirrored
    assert {path.name for path in run.iterdir()} == FILES | {"wandb"}
    folder = run.parents[2]
    assert {path.name for path in folder.iterdir()} == {"outputs", "home"}
    shutil.rmtree(folder / "home")
