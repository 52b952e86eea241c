"""The outermost layer: commands, exit codes, and one sentence for anything that is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stability_lab
from stability_lab import cli
from stability_lab.config import config_dir

BAD_INPUT = {
    "unknown stabilizer": (["+stabilizer=qknrom"], ["stabilizer", "qknrom", "qknorm"]),
    "unknown group": (["+stabiliser=qknorm"], ["stabiliser", "stabilizer"]),
    "unknown key": (["+sed=3"], ["sed", "seed"]),
    "null as a stabilizer": (["+stabilizer=null"], ["stabilizer=null"]),
    "number as a stabilizer": (["+stabilizer=30"], ["stabilizer=30"]),
    "conflict": (["+stabilizer=[rmsnorm,layernorm]"], ["rmsnorm", "layernorm", "'norm'"]),
    "negative weight": (["+stabilizer=zloss", "stabilizer.zloss.weight=-1"], ["stabilizer.zloss.weight=-1"]),
    "word for a number": (["+stabilizer=qknorm", "stabilizer.qknorm.eps=abc"], ["stabilizer.qknorm.eps=abc"]),
    "option of a stabilizer": (["+stabilizer=qknorm", "stabilizer.qknorm.epz=1"], ["epz", "did you mean eps"]),
    "scope": (["+stabilizer=qknorm", "stabilizer.qknorm.scope=x"], ["stabilizer.qknorm.scope", "x", "head", "full"]),
    "no group of options": (["+stabilizer=qknorm", "stabilizer.qknorm=3"], ["stabilizer.qknorm", "3"]),
    "word for a rate": (["optimizer.lr=abc"], ["optimizer.lr=abc"]),
    "no step": (["trainer.max_steps=0"], ["trainer.max_steps=0", "1 or more"]),
    "heads": (["model.n_heads=5"], ["model.n_heads=5", "model.d_model=128"]),
    "context longer than the data": (["model.seq_len=100000000"], ["model.seq_len=100000000", "664960"]),
    "missing file": (["data=text", "data.path=missing.txt"], ["data.path=missing.txt", "no such file"]),
    "no path": (["data=text"], ["data.path is missing"]),
    "split": (["data.val_every=1"], ["data.val_every=1"]),
    "vocabulary": (["model.vocab_size=100"], ["model.vocab_size=100", "257"]),
    "tracking mode": (["tracking.mode=sometimes"], ["tracking.mode", "sometimes", "offline"]),
    "foreign class": (["tracking._target_=os.system"], ["tracking._target_=os.system"]),
    "missing class": (["tracking._target_=stability_lab.nope.Nope"], ["tracking._target_=stability_lab.nope.Nope"]),
    "no class of options": (
        ["tracking._target_=stability_lab.model.transformer.GPT"],
        ["tracking._target_=stability_lab.model.transformer.GPT"],
    ),
    "name of a run": (["run_name=a/b"], ["run_name=a/b"]),
    "a model too large to count": (["model.d_model=4000000000"], ["model.d_model"]),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stability_lab", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_one_error(stderr: str, stdout: str, words: list[str]) -> None:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in stdout + stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name: str, own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = BAD_INPUT[name]
    assert cli.run(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, words)
    assert shown.out == ""
    assert list(own_folder.iterdir()) == []


# One job of the sweep is fine, and comes first.
BAD_JOBS = {
    "unknown stabilizer": ["+stabilizer=none,qknrom"],
    "unknown group": ["seed=0,1", "+stabiliser=qknorm"],
    "unknown key": ["seed=0,1", "+sed=3"],
    "null as a stabilizer": ["+stabilizer=none,null"],
    "number as a stabilizer": ["+stabilizer=none,30"],
    "conflict": ["+stabilizer=none,[rmsnorm,layernorm]"],
    "negative weight": ["+stabilizer=none,zloss", "stabilizer.zloss.weight=-1"],
    "word for a number": ["+stabilizer=qknorm", "stabilizer.qknorm.eps=1e-6,abc"],
    "option of a stabilizer": ["+stabilizer=none,qknorm", "stabilizer.qknorm.epz=1"],
    "word for a rate": ["optimizer.lr=3e-3,abc"],
    "no step": ["trainer.max_steps=5,0"],
    "heads": ["model.n_heads=4,5"],
    "context longer than the data": ["model.seq_len=16,100000000"],
    "missing file": ["data=text", f"data.path={Path(__file__).as_posix()},missing.txt"],
    "no path": ["data=sotu,text"],
    "vocabulary": ["model.vocab_size=null,100"],
    "a model too large to count": ["model.d_model=32,4000000000"],
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_bad_job_of_a_sweep(name: str, own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = BAD_INPUT[name][1]
    assert cli.run(["train", "-m", *BAD_JOBS[name]]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, [] if name == "heads" else words)
    assert list(own_folder.iterdir()) == []


def test_a_fault_after_the_end_of_the_run(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "debug.inject=nan_grad@41", "trainer.max_steps=40"]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, ["debug.inject=nan_grad@41", "trainer.max_steps", "40"])
    assert list(own_folder.iterdir()) == []


def test_a_sweep_without_its_flag(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "seed=1,2"]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, ["seed=1,2", "-m"])
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+stabilizer=qknrom"], ["stabilizer=qknrom", "did you mean qknorm?"]),
        (["trainer.max_steps=5,0", "-m"], ["trainer.max_steps=0"]),
    ],
)
def test_bad_input_of_a_real_process(arguments: list[str], words: list[str], own_folder: Path) -> None:
    done = command("train", *arguments, cwd=own_folder)
    assert done.returncode == 2
    assert_one_error(done.stderr, done.stdout, words)
    assert list(own_folder.iterdir()) == []


def test_bad_input_of_the_console_script(own_folder: Path) -> None:
    script = Path(sys.executable).with_name("stability-lab")
    done = subprocess.run([script, "tarin"], cwd=own_folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert_one_error(done.stderr, done.stdout, ["tarin", "did you mean train?"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 0
    shown = capsys.readouterr()
    for name in cli.COMMANDS:
        assert f"stability_lab {name}" in shown.out
    assert "Exit codes" in shown.out
    assert shown.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == stability_lab.__version__


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "train"])
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.run([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: stability_lab {name}")


@pytest.mark.slow
def test_train_help_shows_examples_groups_and_keys(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:  # Hydra's way to end after its help
        cli.run(["train", "--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    names = sorted(path.stem for path in (config_dir() / "stabilizer").glob("*.yaml"))
    for text in (
        "python -m stability_lab train +stabilizer=qknorm",
        "'+stabilizer=[qknorm,zloss]' stabilizer.zloss.weight=1e-5",
        "train -m +stabilizer=none,qknorm optimizer.lr=3e-3,3e-2",
        f"stabilizer: {', '.join(names)}",
        "micro_batch_size: 16",
        "Exit codes",
    ):
        assert text in shown
    assert list(own_folder.iterdir()) == []


def test_cfg_job_prints_the_configuration(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--cfg", "job", "+stabilizer=zloss", "stabilizer.zloss.weight=1e-5"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^stabilizer:\n  zloss:\n    _target_: \S+ZLoss\n    weight: 1.0e-05$", shown, re.MULTILINE)
    assert re.search(r"^  max_steps: 300$", shown, re.MULTILINE)
    assert list(own_folder.iterdir()) == []


def test_cfg_job_refuses_what_a_run_would_refuse(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--cfg", "job", "+sed=3"]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, ["sed", "did you mean seed?"])


def test_several_processes_are_refused(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["train"]) == 2
    shown = capsys.readouterr()
    assert_one_error(shown.err, shown.out, ["WORLD_SIZE=2", "torchrun"])
    assert list(own_folder.iterdir()) == []


def test_one_process_of_a_launcher_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.run(["train", "--cfg", "job"]) == 0


def test_a_reader_that_has_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_dispatch", closed)
    assert cli.run(["stabilizers"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["stabilizers"]])
def test_a_full_disk_below_the_output_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "stability_lab", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: writing failed: No space left on device\n")


def test_other_faults_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(cli, "_dispatch", refused)
    with pytest.raises(ConnectionRefusedError):
        cli.run(["train"])


def test_ctrl_c_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", stopped)
    assert cli.run(["train"]) == 130


def test_the_process_ends_with_the_code_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["nonsense"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: nonsense is not a command: ")


def test_what_must_not_be_read_is_one_sentence(run_command, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "outputs/reproduction")

    monkeypatch.setattr("stability_lab.commands.reproduce.main", refuse)
    shown = run_command("reproduce", "textbook")
    assert (shown.code, shown.err) == (2, "error: outputs/reproduction: Permission denied\n")


@pytest.mark.parametrize("command", ["train", "runs", "data"])
def test_a_system_without_fcntl_gets_a_sentence(command: str) -> None:
    """Windows. A process of its own, for here the modules that need it are imported already."""
    script = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from stability_lab.cli import main; main([sys.argv[1], *['inspect'] * (sys.argv[1] == 'data'), '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", script, command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {command} works on Linux and macOS, and on Windows inside WSL: here is no fcntl\n"
