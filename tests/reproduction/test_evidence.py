"""What is kept of a run, and what is derived from its series."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.reproduction.evidence import failing_row, small

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
        "steps": 100,
        "events": {"grad_norm_spike": 2, "x": 1},
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


def test_where_a_loss_leaves_a_level_for_good() -> None:
    losses = np.r_[np.full(30, 3.0), np.full(20, 2.0), np.full(3, 9.0), np.full(20, 2.0), np.full(40, np.nan)]
    # The mean of 15 passes 2.6 for good with the first value that is not finite.
    assert failing_row(losses, 2.6) == 73
    assert failing_row(losses[:73], 2.6) == 72, "it ends below: the last row"
    assert failing_row(losses, 1.5) is None
    assert failing_row(losses[:10], 9.0) is None
