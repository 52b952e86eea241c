"""Sweeps: what a job that fails, diverges or is stopped does to the others, and what is left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stability_lab import cli
from stability_lab.run.sweep import IN_USE, NOT_RUN, RESULT, finish, new_journal, told

ONE = "sweep.workers=1"


@pytest.fixture
def words(tiny_overrides: tuple[str, ...], tmp_path: Path) -> list[str]:
    return ["train", "-m", *tiny_overrides, f"output_dir={tmp_path}", "group=sweep", "trainer.max_steps=8", ONE]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep" / RESULT).read_text(encoding="utf-8"))


def states(folder: Path) -> list[str]:
    return [job["status"] for job in result(folder)["jobs"]]


FAULTS = "debug.inject=null,raise@3,nan_loss@5,null"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["debug.inject=null,nan_loss@5"], 0, ["completed", "diverged"]),
        (["debug.inject=nan_loss@5,null", "sweep.strict=true"], 3, ["diverged", "completed"]),
        (["debug.inject=null,raise@3,nan_loss@5"], 1, ["completed", "failed", "diverged"]),
        (["debug.inject=raise@3,null", "sweep.fail_fast=true"], 1, ["failed", NOT_RUN]),
        (["debug.inject=raise@3,nan_loss@5", "sweep.strict=true"], 1, ["failed", "diverged"]),
    ],
)
def test_a_diverged_run_is_a_result_and_a_failed_one_an_error(
    words: list[str], tmp_path: Path, options: list[str], code: int, expected: list[str]
) -> None:
    assert cli.run([*words, *options]) == code
    assert states(tmp_path) == expected
    assert result(tmp_path)["exit_code"] == code


@pytest.mark.slow
def test_an_error_is_told_at_once_and_in_the_table_and_in_the_jobs_own_log(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words, "debug.inject=raise@3,null"]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("failed: InjectedFault")]
    after = [i for i, line in enumerate(lines) if line.startswith("job 2: stabilizers")]
    assert told[0] < after[0]
    assert any(line.startswith("job 1 failed: InjectedFault: debug.inject=raise@3 (traceback in") for line in lines)
    assert any(line.startswith("[2 of 2]") and line.endswith("0 to go") for line in lines)
    assert not any(line.startswith("step ") for line in lines)
    job = result(tmp_path)["jobs"][0]
    assert job["reason"] == "InjectedFault: debug.inject=raise@3"
    assert "Traceback" in (Path(job["path"]) / "train.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_names_are_made_of_what_varies(words: list[str], tmp_path: Path) -> None:
    assert cli.run([*words, "+stabilizer=none,zloss", "seed=1,2"]) == 0
    names = [Path(job["path"]).name for job in result(tmp_path)["jobs"]]
    assert len(set(names)) == 4
    assert all(len(name) < 100 for name in names)
    assert [name.rpartition("_")[0] for name in names] == [
        f"{arm}_lr0.01_seed{seed}" for arm in ("none", "zloss") for seed in (1, 2)
    ]


def contents(folder: Path) -> dict[Path, int]:
    """Of the runs; the sweep's own journal goes on."""
    return {path: path.stat().st_mtime_ns for run in folder.iterdir() if run.is_dir() for path in run.rglob("*")}


@pytest.mark.slow
def test_the_same_sweep_again_does_nothing_twice(words: list[str], tmp_path: Path) -> None:
    assert cli.run([*words, "seed=0,1"]) == 0
    before = contents(tmp_path / "sweep")
    assert cli.run([*words, "seed=0,1"]) == 0
    assert contents(tmp_path / "sweep") == before
    assert [job["skipped"] for job in result(tmp_path)["jobs"]] == [True, True]
    assert cli.run([*words, "seed=0,1,2"]) == 0
    assert [job["skipped"] for job in result(tmp_path)["jobs"]] == [True, True, False]
    assert {path: at for path, at in contents(tmp_path / "sweep").items() if path in before} == before


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}


def start(words: list[str], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stability_lab", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), **options
    )


def wait_for(folder: Path, pattern: str, n: int = 1) -> None:
    until = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < n:
        assert time.monotonic() < until, f"no {pattern}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("in_the_foreground")
def test_a_sweep_that_was_interrupted_goes_on_where_it_was(words: list[str], tmp_path: Path) -> None:
    """Ctrl-C in the third of four jobs: two are left alone, the third goes on, the fourth runs."""
    words = [*words, "seed=0,1,2,3", "trainer.max_steps=300", "trainer.checkpoint_every=20", "trainer.log_every=5"]
    process = start(words, start_new_session=True)
    wait_for(tmp_path, "sweep/*seed2*/checkpoints/*")
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGINT), out
    assert states(tmp_path) == ["completed", "completed", "interrupted", NOT_RUN]
    done = {path: at for path, at in contents(tmp_path / "sweep").items() if "seed2" not in str(path)}
    assert cli.run(words) == 0
    assert states(tmp_path) == ["completed"] * 4
    now = contents(tmp_path / "sweep")
    assert {path: now[path] for path in done} == done
    assert [job["skipped"] for job in result(tmp_path)["jobs"]] == [True, True, False, False]
    third = Path(result(tmp_path)["jobs"][2]["path"])
    steps = [json.loads(line)["step"] for line in (third / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 301))
    assert len(list((tmp_path / "sweep").glob("*seed2*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_each_launcher_with_a_failing_and_a_diverging_job(words: list[str], tmp_path: Path, launcher: str) -> None:
    words.remove(ONE)
    process = start([*words, f"hydra/launcher={launcher}", FAULTS.removesuffix(",null")], cwd=tmp_path)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert states(tmp_path) == ["completed", "failed", "diverged"]
    assert out.count(" to go") == 3
    threads = {json.loads(path.read_text())["threads"] for path in (tmp_path / "sweep").glob("*/manifest.json")}
    assert threads == {1}


@pytest.mark.slow
def test_workers_stop_with_a_checkpoint_when_the_first_process_is_told_to(words: list[str], tmp_path: Path) -> None:
    words = [*words, "seed=0,1,2", "trainer.max_steps=100000", "trainer.checkpoint_every=100"]
    process = start([*words, "sweep.workers=2"])
    wait_for(tmp_path, "sweep/*/checkpoints/*", 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    assert states(tmp_path) == ["interrupted", "interrupted", NOT_RUN]
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/summary.json")]
    assert [summary["status"] for summary in summaries] == ["interrupted"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["hydra/launcher=joblb", "seed=0,1"], "joblb"),
        (["sweep.strict=maybe", "seed=0,1"], "sweep.strict"),
        (["sweep.fail_fst=true", "seed=0,1"], "did you mean fail_fast"),
        (["sweep.workers=0", "seed=0,1"], "sweep.workers=0: must be 1 or more"),
        (["sweep.workers=all", "seed=0,1"], "sweep.workers=all: must be a whole number or auto"),
        (["hydra/launcher=joblib", "seed=0,1"], "sweep.workers=1: hydra/launcher=joblib has options of its own"),
    ],
)
def test_bad_options_of_a_sweep(words, tmp_path: Path, capsys, options: list[str], message: str) -> None:
    assert cli.run([*words, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_is_not_installed_is_named(words, tmp_path: Path, capsys, monkeypatch) -> None:

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("stability_lab.command_line.find_spec", missing)
    words.remove(ONE)
    assert cli.run([*words, "hydra/launcher=submitit_local", "seed=0,1"]) == 2
    assert "pip install 'stability-lab[sweep]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_has_the_same_bits_however_many_run_beside_it(words: list[str], tmp_path: Path) -> None:
    words = [word for word in words if not word.startswith(("trainer.threads", "group"))]
    for workers in (1, 2):
        assert cli.run([*words, "seed=0,1,2", f"group=g{workers}", f"sweep.workers={workers}"]) == 0
    assert cli.run([*words[:1], *words[2:], "seed=1", "group=alone", "trainer.threads=1"]) == 0
    rows = {path.parent: losses(path) for path in tmp_path.glob("*/*/metrics.jsonl")}
    for (path,) in (tmp_path.glob(f"g2/*seed{seed}*") for seed in (0, 1, 2)):
        assert rows[path] == rows[tmp_path / "g1" / path.name]
    (alone,), (beside,) = tmp_path.glob("alone/*"), tmp_path.glob("g2/*seed1*")
    assert rows[alone] == rows[beside]
    pids = {record["pid"] for record in journal_of(tmp_path / "g2") if "pid" in record}
    assert len(pids) == 2
    assert os.getpid() not in pids


def losses(path: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [tuple(value for key, value in row.items() if not key.startswith("perf/")) for row in rows]


def journal_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_own_job_alone(words: list[str], tmp_path: Path) -> None:
    words = [*words, "sweep.workers=2", "if_exists=overwrite", "trainer.max_steps=200"]
    process = start([*words, "debug.inject=kill@3,null", "seed=0,1"], cwd=tmp_path)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert states(tmp_path) == ["failed", "failed", "completed", "completed"]
    assert "its process ended without a word" in out
    assert "job 1 lost its process: it is started once more, alone" in out


@pytest.mark.slow
def test_workers_end_with_a_checkpoint_when_their_sweep_is_killed(words: list[str], tmp_path: Path) -> None:
    words = [*words, "seed=0,1,2", "trainer.max_steps=100000", "trainer.checkpoint_every=100", "sweep.workers=2"]
    process = start(words)
    wait_for(tmp_path, "sweep/*/checkpoints/*", 2)
    pids = {record["pid"] for record in journal_of(tmp_path / "sweep") if "pid" in record}
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    end = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.2)
    assert not any(is_alive(pid) for pid in pids)
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/summary.json")]
    assert [(summary["status"], summary["ended_by"]) for summary in summaries] == [("interrupted", "SIGTERM")] * 2


def is_alive(pid: int) -> bool:
    """A process that nobody has waited for is none that works."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The journal alone


OUTCOME: Mapping[str, Any] = {
    "path": "a/b",
    "status": "completed",
    "verdict": "stable",
    "val_loss": 1.0,
    "exit_code": 0,
}


def test_a_job_that_ended_without_a_word_has_failed(tmp_path: Path) -> None:
    journal = new_journal(tmp_path, 3, ("seed",), fail_fast=False, parallel=True)
    journal.started(1, 2)
    journal.ended(1, {**OUTCOME, "seconds": 1.0})
    journal.started(2, 2)
    code = finish(journal, ["train"], [["seed=0"], ["seed=1"], ["seed=2"]], strict=False, code=1)
    assert code == 1
    jobs = json.loads((tmp_path / RESULT).read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["completed", "failed", NOT_RUN]
    assert "without a word" in jobs[1]["reason"]
    assert jobs[2]["overrides"] == ["seed=2"]


def test_what_another_start_trains_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = new_journal(tmp_path, 3, ("seed",), fail_fast=True, parallel=False)
    other = {"path": tmp_path / "none_seed0", "status": IN_USE, "reason": "it is in use by process 7", "exit_code": 0}
    with caplog.at_level("INFO", logger="stability_lab.run.sweep"), told(journal):
        journal.ended(1, {**other, "seconds": 0.1})
        assert journal.stopped() is None
        journal.ended(2, {**OUTCOME, "seconds": 1.0})
    assert "none_seed0: in use, it is in use by process 7" in caplog.text
    assert finish(journal, [], [["seed=0"], ["seed=1"]], strict=True, code=0) == 0
    journal.ended(3, {**OUTCOME, "status": "failed", "seconds": 1.0})
    assert finish(journal, [], [["seed=0"], ["seed=1"], ["seed=2"]], strict=True, code=0) == 1
    assert json.loads((tmp_path / RESULT).read_text())["counts"] == {IN_USE: 1, "completed": 1, "failed": 1}


@pytest.mark.slow
def test_two_starts_of_a_sweep_at_once_share_its_jobs(words: list[str], tmp_path: Path) -> None:
    words = [*words, "seed=0,1", "trainer.max_steps=100"]
    processes = [start(words) for _ in range(2)]
    outs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    assert "failed" not in "".join(outs)
    assert len(list((tmp_path / "sweep").glob("none_*"))) == 2
    assert cli.run(words) == 0
    assert [(job["status"], job["skipped"]) for job in result(tmp_path)["jobs"]] == [("completed", True)] * 2


def test_half_a_line_and_an_earlier_start_of_the_sweep_do_not_count(tmp_path: Path) -> None:
    earlier = new_journal(tmp_path, 1, (), fail_fast=True, parallel=False)
    earlier.ended(1, {**OUTCOME, "status": "failed"})
    assert earlier.stopped() is not None
    journal = new_journal(tmp_path, 1, (), fail_fast=True, parallel=False)
    assert journal.stopped() is None
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"launch": "x", "jo')
    assert journal.results() == {}


def test_a_stop_keeps_further_jobs_from_starting(tmp_path: Path) -> None:
    journal = new_journal(tmp_path, 2, (), fail_fast=False, parallel=True)
    journal.ended(1, {**OUTCOME, "status": "failed"})
    assert journal.stopped() is None
    journal.stop("Ctrl-C")
    assert journal.stopped() == "the sweep was stopped by Ctrl-C"
    assert finish(journal, [], [[], []], strict=False, code=0) == 130


def test_secrets_of_the_command_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a1" * 20
    journal = new_journal(tmp_path, 1, (), fail_fast=False, parallel=False)
    finish(journal, ["train", f"tracking.api_key={secret}"], [[]], strict=False, code=0)
    assert secret not in (tmp_path / RESULT).read_text()


@pytest.mark.slow
def test_a_sweep_over_a_further_key_knows_the_runs_that_are_there(words: list[str], tmp_path: Path) -> None:
    """Another sweep names its runs after other keys, but the same run has the same fingerprint."""
    assert cli.run([*words, "seed=0,1"]) == 0
    assert cli.run([*words, "seed=0,1", "model.dropout=0.0,0.1"]) == 0
    assert [job["skipped"] for job in result(tmp_path)["jobs"]] == [True, False, True, False]
    assert len([path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]) == 4


@pytest.mark.slow
def test_a_job_that_runs_out_of_memory_fails_alone_and_says_what_helps(words, tmp_path: Path, monkeypatch) -> None:
    import torch

    from stability_lab.training.loop import Loop

    train, calls = Loop.train, iter(range(9))

    def full(self: Loop) -> None:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        train(self)

    monkeypatch.setattr(Loop, "train", full)
    assert cli.run([*words, "seed=0,1"]) == 1
    assert states(tmp_path) == ["failed", "completed"]
    assert result(tmp_path)["jobs"][0]["reason"].startswith(
        "out of memory: try trainer.micro_batch_size=2 with more trainer.grad_accum_steps"
    )
