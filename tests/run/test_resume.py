"""A run that was killed goes on: by its folder, by its own command and in a sweep."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from stability_lab.tracking.run_files import read_rows

# Steps that draw random numbers, more than one micro-batch and a schedule with a decay: all that could come out wrong.
HARD = (
    "model.dropout=0.1",
    "trainer.grad_accum_steps=2",
    "trainer.micro_batch_size=2",
    "schedule=wsd",
    "schedule.decay_fraction=0.5",
    "trainer.max_steps=24",
    "trainer.eval_every=10",
    "trainer.log_every=5",
    "trainer.checkpoint_every=4",
)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def measured(run: Path) -> list[str]:
    """The rows as text, so that NaN equals NaN; without what depends on the clock."""
    rows = read_rows(run / "metrics.jsonl")
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("perf/")}) for row in rows]


def assert_equal_runs(ours: Path, other: Path) -> None:
    assert measured(ours) == measured(other)
    assert (ours / "events.jsonl").read_text() == (other / "events.jsonl").read_text()
    for name in ("last/model.safetensors", "best/model.safetensors"):
        assert (ours / "checkpoints" / name).read_bytes() == (other / "checkpoints" / name).read_bytes()
    states = [load_file(run / "checkpoints" / "last" / "training.safetensors") for run in (ours, other)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value.nan_to_num(nan=7.0), states[1][key].nan_to_num(nan=7.0)), key
    summaries = [read(run / "summary.json") for run in (ours, other)]
    for summary in summaries:
        for key in ("tokens_per_s", "perf/peak_memory_bytes"):
            del summary[key]
    assert summaries[0] == summaries[1]


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stability_lab", "train", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_overrides, run_command) -> Path:
    """A run without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_command("train", *tiny_overrides, *HARD, f"output_dir={folder}", "run_name=whole").code == 0
    return folder / "runs" / "whole"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_overrides) -> Path:
    """The same run, killed inside the write of its checkpoint at step 16; do not go on with it, but with a copy."""
    folder = tmp_path_factory.mktemp("killed")
    faults = "debug.inject=kill_in_checkpoint@16"
    done = start(folder, *tiny_overrides, *HARD, faults, "output_dir=.", "run_name=killed")
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return folder / "runs" / "killed"


@pytest.fixture
def copy(killed: Path, here: Path) -> Path:
    return Path(shutil.copytree(killed, here / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which a refused command takes from its dead holder and then removes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_kill_leaves_a_run_that_can_be_told(killed: Path) -> None:
    assert read(killed / "summary.json") == {"status": "running"}
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == [
        "best",
        "last",
        "last.new",
        "step-000008",
    ]
    assert len(measured(killed)) == 16
    assert (killed / ".lock").exists()


def test_it_goes_on_bit_for_bit(copy: Path, whole: Path, run_command) -> None:
    before = read(copy / "manifest.json")
    shown = run_command("train", f"resume={copy}")
    assert (shown.code, shown.err) == (0, "")
    assert f"notice: the run goes on after step 12 ({copy}/checkpoints/last)" in shown.out
    assert "bit for bit" not in shown.out
    assert_equal_runs(copy, whole)
    assert [row["step"] for row in read_rows(copy / "metrics.jsonl")] == list(range(1, 25))
    (aside,) = copy.glob("*.after-*")
    assert aside.name == "metrics.jsonl.after-step-12-1"
    assert [row["step"] for row in read_rows(aside)] == [13, 14, 15, 16]
    manifest = read(copy / "manifest.json")
    (entry,) = manifest.pop("resumes")
    assert manifest == before
    assert entry["step"] == 12
    assert entry["versions"] == manifest["versions"]
    assert "changed" not in entry
    assert not (copy / ".lock").exists()


def test_the_same_command_goes_on_with_if_exists_resume(
    killed: Path, here: Path, whole: Path, tiny_overrides, run_command
) -> None:
    shutil.copytree(killed, here / "runs" / "killed")
    words = ("train", *tiny_overrides, *HARD, "debug.inject=kill_in_checkpoint@16", "output_dir=.", "run_name=killed")
    assert run_command(*words, "if_exists=resume").code == 0
    assert_equal_runs(here / "runs" / "killed", whole)
    again = run_command(*words, "if_exists=resume")
    assert again.code == 0
    assert "is already finished: skipped" in again.out
    assert [path.name for path in (here / "runs").iterdir()] == ["killed"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lr=0.5", "optimizer.lr=0.5: the run in copy has 0.01, and a run that goes on keeps it"),
        ("seed=3", "seed=3: the run in copy has 0"),
        ("+stabilizer=[zloss,qknorm]", "stabilizer=[qknorm,zloss]: the run in copy has []"),
        ("model=gpt_micro", "model.d_model="),
        ("if_exists=new", "if_exists=new: has no meaning beside resume=copy"),
        ("trainer.precision=bf16", "trainer.precision=bf16: the run in copy has fp32"),
        ("trainer.grad_clip=null", "trainer.grad_clip=null: the run in copy has 1.0"),
        ("optimizer.typo=3", "optimizer.typo is not an option of optimizer"),
        ("-m", "resume=copy: goes without -m"),
    ],
)
def test_another_configuration_is_refused(copy: Path, override: str, sentence: str, run_command) -> None:
    before = contents(copy)
    shown = run_command("train", "resume=copy", override)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith(f"error: {sentence}"), shown.err
    assert len(shown.err.splitlines()) == 1
    assert contents(copy) == before


@pytest.mark.slow
def test_fewer_steps_than_the_run_has_done_are_refused(here: Path, tiny_overrides, run_command) -> None:
    assert run_command("train", *tiny_overrides, "output_dir=.", "run_name=a").code == 0
    shown = run_command("train", "resume=runs/a", "trainer.max_steps=3")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("error: trainer.max_steps=3: the run in runs/a has come to step 5 already"), shown.err


def test_an_edited_configuration_is_refused_too(copy: Path, run_command) -> None:
    text = (copy / "config.yaml").read_text(encoding="utf-8")
    (copy / "config.yaml").write_text(text.replace("lr: 0.01", "lr: 0.02"), encoding="utf-8")
    shown = run_command("train", "resume=copy")
    assert shown.code == 2
    assert "optimizer.lr=0.02: the run in copy has 0.01" in shown.err


def test_another_command_under_the_same_name_is_refused(killed: Path, here: Path, tiny_overrides, run_command) -> None:
    shutil.copytree(killed, here / "runs" / "killed")
    words = ("train", *tiny_overrides, *HARD, "output_dir=.", "run_name=killed", "optimizer.beta1=0.5")
    shown = run_command(*words, "if_exists=resume", "debug.inject=kill_in_checkpoint@16")
    assert shown.code == 2
    assert "optimizer.beta1=0.5: the run in runs/killed has 0.9" in shown.err


def test_logging_and_names_may_change(copy: Path, whole: Path, run_command) -> None:
    words = ("trainer.log_every=3", "trainer.checkpoint_every=null", "trainer.keep_checkpoints=1", "run_name=b")
    assert run_command("train", "resume=copy", *words).code == 0
    assert measured(copy) == measured(whole)
    plain = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    assert (plain["trainer"]["log_every"], plain["resume"]) == (3, None)
    changed = read(copy / "manifest.json")["resumes"][0]["changed"]
    assert changed["trainer.log_every"] == [5, 3]
    assert (
        read(copy / "manifest.json")["fingerprint"] == read(copy / "checkpoints" / "last" / "state.json")["fingerprint"]
    )


@pytest.mark.slow
def test_more_steps_go_on_with_a_notice(copy: Path, run_command) -> None:
    fingerprint = read(copy / "manifest.json")["fingerprint"]
    shown = run_command("train", "resume=copy", "trainer.max_steps=40")
    assert shown.code == 0
    notice = next(line for line in shown.out.splitlines() if "trainer.max_steps is 40 and was 24" in line)
    assert "the schedule is that of 40 steps from here on" in notice
    rows = read_rows(copy / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    # wsd over 24 steps would have begun its decay after step 12, over 40 after step 20.
    assert [row["optim/lr"] for row in rows[12:20]] == [0.01] * 8
    assert rows[20]["optim/lr"] < 0.01
    manifest = read(copy / "manifest.json")
    assert manifest["fingerprint"] != fingerprint
    assert manifest["resumes"][0]["fingerprint_before"] == fingerprint


@pytest.mark.slow
def test_a_completed_run_goes_on_to_more_steps_and_else_not(whole: Path, here: Path, run_command) -> None:
    copy = Path(shutil.copytree(whole, here / "copy"))
    before = contents(copy)
    shown = run_command("train", "resume=copy")
    assert shown.code == 0
    assert "copy is already finished: skipped (a larger trainer.max_steps goes on)" in shown.out
    assert contents(copy) == before
    assert run_command("train", "resume=copy", "trainer.max_steps=30").code == 0
    assert len(measured(copy)) == 30
    assert measured(copy)[:24] == measured(whole)


@pytest.mark.slow
def test_a_diverged_run_is_finished(here: Path, tiny_overrides, run_command) -> None:
    words = ("debug.inject=nan_grad@3", "run_name=a", "trainer.checkpoint_every=1")
    assert run_command("train", *tiny_overrides, *words).code == 3
    before = contents(here / "outputs")
    shown = run_command("train", "resume=outputs/runs/a", "trainer.max_steps=50")
    assert shown.code == 3
    assert "already finished" in shown.out
    assert contents(here / "outputs") == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    copy: Path, whole: Path, name: str, run_command
) -> None:
    file = copy / "checkpoints" / "last" / name
    file.write_bytes(file.read_bytes()[:-20])
    shown = run_command("train", "resume=copy")
    assert shown.code == 0
    assert "notice: copy/checkpoints/last is damaged (" in shown.out
    assert f"({name} is not " in shown.out
    assert "notice: the run goes on after step 8 (copy/checkpoints/step-000008)" in shown.out
    assert_equal_runs(copy, whole)
    assert (copy / "checkpoints" / "damaged-1").is_dir()


@pytest.mark.slow
def test_without_a_checkpoint_the_run_starts_over(copy: Path, whole: Path, run_command) -> None:
    shutil.rmtree(copy / "checkpoints")
    shown = run_command("train", "resume=copy")
    assert shown.code == 0
    assert "notice: copy has no checkpoint to go on from: the run starts over" in shown.out
    assert_equal_runs(copy, whole)
    assert len(read_rows(copy / "metrics.jsonl.after-step-0-1")) == 16


@pytest.mark.slow
def test_a_run_that_keeps_no_weights_starts_over_and_says_why(here: Path, tiny_overrides, run_command) -> None:
    words = (*tiny_overrides, "trainer.save_weights=false", "run_name=a", "debug.inject=raise@3")
    failed = run_command("train", *words)
    assert failed.code == 1
    assert "to go on" not in failed.out
    shown = run_command("train", *words, "if_exists=resume")
    assert shown.code == 0
    assert "no checkpoint to go on from, for trainer.save_weights=false keeps none: the run starts over" in shown.out
    run = here / "outputs" / "runs" / "a"
    assert len(measured(run)) == 5
    assert not (run / "checkpoints").exists()
    refused = run_command("train", *tiny_overrides, "trainer.save_weights=false", "debug.inject=kill_in_checkpoint@2")
    assert refused.code == 2
    assert "debug.inject=kill_in_checkpoint: needs trainer.save_weights=true" in refused.err


@pytest.mark.slow
def test_a_failed_run_says_how_to_go_on_and_does(here: Path, whole: Path, tiny_overrides, run_command) -> None:
    failed = run_command("train", *tiny_overrides, *HARD, "debug.inject=raise@15", "run_name=a")
    assert failed.code == 1
    (hint,) = (line for line in failed.out.splitlines() if line.startswith("to go on: "))
    assert hint == "to go on: python -m stability_lab train resume=outputs/runs/a"
    assert run_command(*hint.split("stability_lab ")[1].split()).code == 0
    assert_equal_runs(here / "outputs" / "runs" / "a", whole)


@pytest.mark.parametrize("folder", ["nothing", "outputs"])
def test_what_is_no_run_is_refused(here: Path, folder: str, run_command) -> None:
    (here / "outputs").mkdir()
    shown = run_command("train", f"resume={folder}")
    assert (shown.code, shown.err) == (2, f"error: {folder} is not a run's folder: it has no config.yaml\n")
    assert list((here / "outputs").iterdir()) == []


def test_other_data_is_refused(copy: Path, run_command) -> None:
    file = copy / "checkpoints" / "last" / "state.json"
    file.write_text(json.dumps(read(file) | {"data": "0" * 64}), encoding="utf-8")
    before = contents(copy)
    shown = run_command("train", "resume=copy")
    assert shown.code == 2
    assert "was trained on other data" in shown.err
    assert contents(copy) == before


@pytest.mark.slow
def test_another_machine_is_said(copy: Path, run_command) -> None:
    shown = run_command("train", "resume=copy", "trainer.threads=2", "trainer.deterministic=true")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    assert shown.code == 0
    other = "threads 2 (was 1), deterministic True (was False)"
    assert f"notice: the run goes on with {other}: its results are not bit for bit those" in shown.out


# A folder that came from somebody else


@pytest.mark.parametrize("group", ["data", "tokenizer", "tracking"])
def test_a_foreign_class_is_not_imported(copy: Path, group: str, run_command) -> None:
    plain = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    plain[group] = {"_target_": "os.system", "command": "touch stolen"}
    (copy / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    before = contents(copy)
    shown = run_command("train", "resume=copy")
    assert shown.code == 2
    assert f"{group}._target_=os.system" in shown.err
    assert contents(copy) == before
    assert not (copy.parent / "stolen").exists()


@pytest.mark.slow
def test_nothing_in_it_leads_out_of_the_folder(copy: Path, here: Path, run_command) -> None:
    plain = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    plain |= {"output_dir": str(here / "elsewhere"), "group": "other", "run_name": "other"}
    (copy / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    for name in ("manifest.json", "checkpoints/last/state.json"):
        (copy / name).write_text(json.dumps(read(copy / name) | {"tracker_id": "../../x"}), encoding="utf-8")
    assert run_command("train", "resume=copy").code == 0
    assert sorted(path.name for path in here.iterdir()) == ["copy"]
    assert read(copy / "manifest.json")["tracker_id"] is None
    (here / "precious").write_text("precious", encoding="utf-8")
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").symlink_to(here / "precious")
    shown = run_command("train", "resume=copy", "trainer.max_steps=30")
    assert shown.code == 2
    assert "copy/metrics.jsonl is a symbolic link" in shown.err
    assert (here / "precious").read_text(encoding="utf-8") == "precious"


def test_its_words_cannot_steer_the_terminal(copy: Path, run_command) -> None:
    file = copy / "checkpoints" / "last" / "state.json"
    state = read(file)
    state["config"]["schedule"]["name"] = "\x1b[2J\x1b]0;owned\x07"
    file.write_text(json.dumps(state), encoding="utf-8")
    shown = run_command("train", "resume=copy")
    assert shown.code == 2
    assert "schedule.name=wsd: the run in copy has \\x1b[2J\\x1b]0;owned\\x07" in shown.err
    assert "\x1b" not in shown.out + shown.err
    state["config"] = "none"
    state["machine"] = {"device": "\x1b[2J", "threads": []}
    file.write_text(json.dumps(state), encoding="utf-8")
    shown = run_command("train", "resume=copy")
    assert shown.code == 0
    assert "device cpu (was \\x1b[2J)" in shown.out
    assert "\x1b" not in shown.out + shown.err


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"watch": []}, {"watch": None}, {"step": 11}, {"sampler": {"__class__": "x"}}])
def test_a_state_that_does_not_hold_together_is_refused_and_nothing_lost(copy: Path, change: Any, run_command) -> None:
    file = copy / "checkpoints" / "last" / "state.json"
    file.write_text(json.dumps(read(file) | change), encoding="utf-8")
    before = contents(copy)
    shown = run_command("train", "resume=copy")
    assert shown.code == 2
    assert "error: copy/checkpoints/last does not hold this run's state: " in shown.err
    after = contents(copy)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"train.log"}


# Sweeps


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was_killed(tmp_path: Path, tiny_overrides) -> None:
    """The second of three jobs is killed in the middle: the first is skipped, the second goes on, the third runs.

    What is only written, and where, may be said otherwise each time.
    """
    words = (*tiny_overrides, *HARD, "-m", "seed=0,1", "debug.inject=null,kill@11", "output_dir=parts")
    words += ("sweep.workers=1",)  # in this process, which the fault then kills
    done = start(tmp_path, *words)
    assert done.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "parts").iterdir()
    first, second = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: len(path.name))
    before = contents(first)
    again = start(tmp_path, *words, "sweep.fail_fast=true", "trainer.keep_checkpoints=1")
    assert again.returncode == -signal.SIGKILL  # the fault of the job after the next
    assert f"{first.name}: completed, " in again.stdout
    assert "already there; 3 to go" in again.stdout
    assert "the run goes on after step 8" in again.stdout
    assert contents(first) == before
    assert read(second / "summary.json")["status"] == "completed"
    assert measured(second) == measured(first)
    assert start(tmp_path, *words, "sweep.strict=true").returncode == 0
    assert list((tmp_path / "parts").iterdir()) == [folder]
    runs = [path for path in folder.iterdir() if path.is_dir()]
    assert len(runs) == 4
    assert all(read(run / "summary.json")["status"] == "completed" for run in runs)
    assert all(len(measured(run)) == 24 for run in runs)


# Two processes


@pytest.mark.slow
def test_two_simultaneous_starts_run_once(copy: Path, whole: Path) -> None:
    command = [sys.executable, "-m", "stability_lab", "train", "resume=copy"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=copy.parent, **pipes) for _ in range(3)]
    shown = [process.communicate(timeout=120) for process in processes]
    codes = [process.returncode for process in processes]
    for code, (out, err) in zip(codes, shown, strict=True):
        assert code in (0, 2)
        if code == 2:
            assert "copy is in use by process " in err
        elif "goes on after" not in out:
            assert "already finished" in out
    assert sum("the run goes on after step 12" in out for out, _ in shown) == 1
    assert_equal_runs(copy, whole)


@pytest.mark.slow
def test_a_run_that_is_alive_is_left_alone(copy: Path, run_command) -> None:
    script = (
        "import pathlib, sys; from stability_lab.disk.lock import acquire\n"
        "lock = acquire(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script, str(copy)], **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = contents(copy)
        shown = run_command("train", "resume=copy")
        assert shown.code == 2
        assert shown.err.startswith(f"error: copy is in use by process {holder.pid} on {os.uname().nodename}, since 2")
        assert contents(copy) == before
        holder.kill()
    assert run_command("train", "resume=copy").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my runs (1)", "x=y", "it's", "a,b", "[c]", "$d", "back\\slash"])
def test_any_path_can_be_resumed(killed: Path, here: Path, name: str, run_command) -> None:
    folder = here / name / "run"
    shutil.copytree(killed, folder)
    assert run_command("train", f"resume={folder}").code == 0
    assert read(folder / "summary.json")["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "lost", "first"),
    [
        (lambda lines: lines[:5], 7, 6),
        (lambda lines: lines[:3] + lines[5:], 2, 4),
        (lambda lines: [*lines[:8], "half a li", *lines[8:]], 4, 9),
        (lambda lines: [], 12, 1),
    ],
)
def test_rows_that_are_lost_are_told(copy: Path, whole: Path, run_command, damage: Any, lost: int, first: int) -> None:
    """The verdict is that of all rows, and the manifest says what the curves lack."""
    step = read(copy / "checkpoints" / "last" / "state.json")["step"]
    lines = (copy / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (copy / "metrics.jsonl").write_text("".join(f"{line}\n" for line in damage(lines)), encoding="utf-8")
    shown = run_command("train", f"resume={copy}")
    assert shown.code == 0, shown.out
    words = f"metrics.jsonl lacks {lost} of the {step} rows before the checkpoint, the first of step {first}"
    assert words in shown.out
    assert read(copy / "manifest.json")["resumes"][-1]["lost_rows"] == lost
    assert len(measured(copy)) == 24 - lost
    ours, theirs = read(copy / "summary.json"), read(whole / "summary.json")
    assert (ours["verdict"], ours["scores"], ours["final"]["train/loss"]) == (
        theirs["verdict"],
        theirs["scores"],
        theirs["final"]["train/loss"],
    )


def test_a_new_run_of_if_exists_resume_is_said(here: Path, tiny_overrides, run_command) -> None:
    words = ("train", *tiny_overrides, "output_dir=.", "if_exists=resume", "trainer.max_steps=2")
    assert "notice: no run of this configuration is there yet" in run_command(*words).out
    assert "is there yet" not in run_command(*words).out
