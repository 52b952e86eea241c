"""What is kept of a run, and that it comes back as it was."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab.analysis.runs import RunRecord
from stability_lab.config import ConfigError
from stability_lab.reproduction.evidence import Evidence, Run, read, small, write

SCORE = {"score": 0.0, "n_spikes": 0, "n_scored": 10, "steps": []}
NORMS = [2.0 + 0.01 * (step % 3) for step in range(1, 101)]


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """100 steps, a gradient norm of 8 at step 50, log Z that falls to -3."""
    rows = [
        {"step": step, "optim/grad_norm": 8.0 if step == 50 else NORMS[step - 1], "train/log_z_mean": -3.0}
        | {"train/loss": 7.0 if step == 3 else 2.0}
        for step in range(1, 101)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    events = [
        {"step": step, "event": name} for step, name in ((50, "grad_norm_spike"), (60, "grad_norm_spike"), (60, "x"))
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events), encoding="utf-8")
    summary: dict[str, Any] = {
        "status": "completed",
        "verdict": "stable",
        "sensitivity": {"0.5": "diverged", "1": "stable", "2": "stable"},
        "initial": {"val/loss": 5.5, "attn/entropy": 1.0},
        "final": {
            "val/loss": 2.0,
            "act/rms/L00": 0.5,
            "act/rms/L01": 1.0,
            "act/rms/L02": 1.5,
            "attn/scale/L00": 1.0,
            "x": math.nan,
        },
        "max_attn_logit": 1000.0,
        "tokens_per_s": 5000.0,
        "scores": {"grad_norm": {"olmo2": dict(SCORE, window=1000)}},
    }
    manifest = {"created": "2026-01-02T", "argv": ["secret"], "data": {"first_batch": "f", "documents": 3}}
    return RunRecord(tmp_path, {"optimizer": {"lr": 1e-3}, "seed": 3, "model": {"d_model": 4}}, manifest, summary)


def derived(record: RunRecord, injected: tuple[int, ...] = ()) -> dict[str, float]:
    return small(record, injected)["summary"]["final"]


def test_what_is_derived_from_the_series(record: RunRecord) -> None:
    found = derived(record, injected=(50, 90))
    logs = np.log(NORMS)
    assert found["grad_level"] == pytest.approx(np.mean(logs[50:]), rel=1e-12)
    assert found["grad_growth"] == pytest.approx(np.median(logs[90:]) - np.median(logs[10:20]), abs=1e-12)
    jumps = [math.log(8.0) - np.median(logs[29:49]), logs[89] - np.median(logs[69:89])]
    assert found["log_injected_ratio"] == pytest.approx(np.mean(jumps), rel=1e-9)
    assert found["abs_log_z"] == 3.0
    assert found["rms_growth"] == 3.0
    assert found["log10_max_attn_logit"] == 3.0
    assert found["loss_peak"] == 7.0
    assert found["spike_events"] == 2
    assert found["log_tokens_per_s"] == pytest.approx(math.log(5000.0))


def test_what_a_run_does_not_give_is_left_out(record: RunRecord) -> None:
    (record.path / "metrics.jsonl").unlink()
    assert derived(record, (50,)).keys() & {"grad_level", "grad_growth", "log_injected_ratio", "abs_log_z"} == set()


def test_what_is_written_is_read_back(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "data" / "a.jsonl"
    runs = (Run("qknorm", "large", 1e-3, 3, record),)
    write(path, Evidence({"name": "n"}, runs, {"value": 1.5, "list": [1.0, 2.0]}), [small(record)])
    first = path.read_bytes()
    found = read(path)
    assert found.head == {"name": "n"}
    assert found.values == {"value": 1.5, "list": [1.0, 2.0]}
    (run,) = found.runs
    assert (run.arm, run.setting, run.lr, run.seed) == ("qknorm", "large", 1e-3, 3)
    assert run.metric("val/loss") == 2.0
    assert run.metric("x") is None
    assert run.record.initial("val/loss") == 5.5
    assert run.record.score("grad_norm", "olmo2")["n_scored"] == 10
    assert run.record.manifest["data"]["first_batch"] == "f"
    assert b"secret" not in first
    assert b"attn/scale/L00" not in first
    assert len(first) < 3000
    write(path, found, [small(run.record)])
    # Without its series the second copy cannot know more than the first; what it knows is the same.
    assert read(path).runs[0].metric("rms_growth") == 3.0


def test_d_decides_what_diverged(record: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, Evidence({"name": "n"}, (Run("a", "", None, 3, record),)), [small(record)])
    assert read(path, delta=0.5).runs[0].record.diverged
    assert read(path, delta=0.5).runs[0].metric("val/loss") is None
    assert not read(path, delta=1.0).runs[0].record.diverged
    summary = {**record.summary, "status": "diverged", "verdict": "diverged"}
    stopped = dataclasses.replace(record, summary=summary)
    write(path, Evidence({"name": "n"}, (Run("a", "", None, 3, stopped),)), [small(stopped)])
    assert not read(path, delta=2.0).runs[0].record.diverged


@pytest.mark.parametrize("text", ["", "{", '{"name": 1}\n{"arm": "a"}\n', "[1]\n[2]\n", '{"x": 1}\n{"values": 3}\n'])
def test_a_damaged_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is damaged"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.jsonl")
