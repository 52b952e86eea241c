"""Faults of the machine and values that no machine can hold: one sentence, and what was measured stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError

from stability_lab import cli
from stability_lab.training import checkpoint

KEY = "0123456789abcdef0123456789abcdef01234567"
TINY = [
    *("train", "tracking=local", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.seq_len=8"),
    *("trainer.max_steps=3", "trainer.micro_batch_size=2", "trainer.eval_sequences=2"),
]


@pytest.mark.slow
def test_weights_that_cannot_be_saved_fail_the_run_and_keep_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> bool:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", full)
    assert cli.run(TINY) == 1
    shown = capsys.readouterr()
    (line,) = (line for line in shown.out.splitlines() if line.startswith("failed: "))
    assert line.startswith("failed: the weights of step 3 could not be written: No space left on device")
    assert "Traceback" not in shown.out + shown.err
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 1, 3)
    assert len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_a_credential_in_an_error_reaches_no_file_that_is_mirrored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError(f"401 for key {KEY}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stability_lab.run.job.build_run", refused)
    assert cli.run(TINY) == 1
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert "401 for key" in summary["ended_by"]
    assert KEY not in summary["ended_by"]


@pytest.mark.parametrize(
    "override", ["seed=99999999999999999999", "trainer.max_steps=99999999999999999999999", "trainer.threads=100000"]
)
def test_a_number_out_of_reach_is_refused(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*TINY, override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {override.partition('=')[0]}=")
    assert not list(tmp_path.iterdir())


def test_a_world_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert cli.run(TINY) == 2


def test_the_last_of_two_values_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*TINY, "trainer.max_steps=2"]) == 0
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    assert "max_steps2" in folder.name


@pytest.mark.parametrize(
    "override",
    [
        "model.d_model=100000000",
        "model.n_layers=1000000000",
        "model.d_ff=100000000000",
        "model.vocab_size=1000000000000",
        "trainer.micro_batch_size=1000000000",
        "trainer.grad_accum_steps=1000000000000",
    ],
)
def test_what_no_machine_can_hold_is_refused_before_anything_is_made(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*TINY, override]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    key = override.partition("=")[0] if "vocab_size" not in override else "model.d_model"
    assert key in line
    assert "GiB or more, and this device has" in line
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["block", "full"])
@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_no_compiler_is_said_before_anything_is_made(
    how: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "empty"))
    assert cli.run([*TINY, f"trainer.compile={how}"]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"error: trainer.compile={how}: needs a C++ compiler")
    assert line.endswith("or set trainer.compile=off")
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interval_beyond_the_run_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([*TINY, "trainer.log_every=1000000000000"]) == 0
