"""The train command on the device, from the command line to the files, and twice with the same result."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stability_lab import cli

pytestmark = pytest.mark.gpu


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Every step's line without what the clock says."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_train_command(device, small_overrides, tmp_path, precision):
    stabilizer = "+stabilizer=[qknorm,softcap,zloss]"
    words = [f"trainer.precision={precision}", "trainer.max_steps=20", f"output_dir={tmp_path}", "run_name=one"]
    assert cli.run(["train", *small_overrides, stabilizer, *words]) == 0
    run = tmp_path / "runs" / "one"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed"
    assert summary["final"]["val/loss"] < summary["initial"]["val/loss"] - 0.3
    assert len(read_rows(run)) == 20
    assert all(math.isfinite(row["train/loss"]) for row in read_rows(run))
    assert manifest["attention"]["backend"] == ("flex" if device.type == "cuda" else "explicit")
    if device.type == "cuda":
        assert manifest["device"] == torch.cuda.get_device_name()
    assert (run / "checkpoints" / "last" / "model.safetensors").is_file()
    assert cli.run(["evaluate", str(run)]) == 0


def test_deterministic_runs_repeat_bit_for_bit(small_overrides, tmp_path):
    # Fresh processes with a clean environment: the option has to make all the arrangements itself.
    environment = {k: v for k, v in os.environ.items() if k not in ("CUBLAS_WORKSPACE_CONFIG", "STABILITY_LAB_CACHE")}
    command = [sys.executable, "-m", "stability_lab", "train", "-m", "+stabilizer=[qknorm,zloss],softcap"]
    command += [*small_overrides, "trainer.deterministic=true", "group=twice"]
    processes = [
        subprocess.Popen(
            [*command, f"output_dir={tmp_path / name}"],
            env={**environment, "STABILITY_LAB_CACHE": str(tmp_path / f"cache-{name}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("a", "b")
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0]
    first = sorted(path.parent for path in (tmp_path / "a" / "twice").glob("*/metrics.jsonl"))
    assert len(first) == 2
    for run in first:
        again = tmp_path / "b" / "twice" / run.name
        assert read_rows(run) == read_rows(again)
        weights = Path("checkpoints") / "last" / "model.safetensors"
        assert (run / weights).read_bytes() == (again / weights).read_bytes()
