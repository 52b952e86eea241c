"""Faults of the machine and values that no machine can hold: one sentence, and what was measured stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stability_lab import cli, run

TINY = [
    *("train", "tracking=local", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.seq_len=8"),
    *("trainer.max_steps=3", "trainer.micro_batch_size=2", "trainer.eval_sequences=2"),
]


def test_weights_that_cannot_be_saved_fail_the_run_and_keep_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> bool:
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "save_weights", full)
    assert cli.run(TINY) == 1
    shown = capsys.readouterr()
    assert "failed: the weights could not be saved: No space left on device" in shown.out
    assert "Traceback" not in shown.out + shown.err
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 1, 3)
    assert len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3


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
