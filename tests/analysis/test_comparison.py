"""Runs on disk become the README's table and figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability_lab.analysis.figures import against_learning_rate
from stability_lab.analysis.runs import find_runs
from stability_lab.analysis.tables import comparison, markdown
from stability_lab.config import ConfigError


def write_run(folder: Path, stabilizers: list[str], lr: float, loss: float | None, **summary: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 0, "optimizer": {"lr": lr}}), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps({"stabilizers": stabilizers}), encoding="utf-8")
    content = {
        "status": "completed",
        "verdict": "stable",
        "final": {} if loss is None else {"val/loss": loss, "val/ppl": 7.0},
        "max_attn_logit": 100 * lr,
        "events": {"grad_norm_spike": 1},
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", ["qknorm", "zloss"], 3e-2, 1.8)
    write_run(tmp_path / "b", [], 3e-2, 2.3)
    write_run(tmp_path / "c", [], 3e-3, None, verdict="diverged", status="diverged")
    return tmp_path


def test_the_baseline_stands_first_and_a_diverged_run_has_no_loss(sweep: Path) -> None:
    table = comparison(find_runs([sweep]))
    assert list(table["stabilizer"]) == ["none", "none", "qknorm + zloss"]
    assert list(table["lr"]) == [3e-3, 3e-2, 3e-2]
    assert table["val/loss"].isna().tolist() == [True, False, False]
    lines = markdown(table).splitlines()
    assert lines[0].startswith("| stabilizer | lr | seed | val/loss |")
    assert lines[2] == "| none | 0.003 | 0 | - | - | 0.3 | 1 | diverged |"
    assert lines[4] == "| qknorm + zloss | 0.03 | 0 | 1.800 | 7.00 | 3 | 1 | stable |"


def test_the_figure_is_a_picture(sweep: Path, tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    against_learning_rate(comparison(find_runs([sweep])), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_folder_without_a_run_and_a_damaged_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run here"):
        find_runs([tmp_path])
    write_run(tmp_path / "a", [], 1e-3, 2.0)
    (tmp_path / "a" / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="its files cannot be read"):
        find_runs([tmp_path])
