"""Real kills at random times: the run ends where one without a stop ends."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability_lab.tracking.jsonl import read_rows

KILLS = 20
# Dropout, accumulation, the fp16 loss scale and a schedule with a decay; checkpoints as often as once in ten steps.
HARD = (
    "model.dropout=0.1",
    "trainer.precision=fp16",
    "trainer.grad_accum_steps=2",
    "trainer.micro_batch_size=2",
    "schedule=wsd",
    "trainer.max_steps=3000",
    "trainer.eval_every=500",
    "diagnostics.probe_every=300",
    "trainer.log_every=7",
    "trainer.checkpoint_every=10",
    "run_name=a",
    "if_exists=resume",
)


def rows(run: Path) -> list[dict[str, str]]:
    return [
        {k: repr(v) for k, v in row.items() if not k.startswith("perf/")} for row in read_rows(run / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_twenty_kills_at_any_moment(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    def command(output: str) -> list[str]:
        words = [*tiny_overrides, *HARD, f"output_dir={output}"]
        return [sys.executable, "-m", "stability_lab", "train", *words]

    started = time.monotonic()
    subprocess.run(command("whole"), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=120)
    length = time.monotonic() - started
    whole, killed = tmp_path / "whole" / "runs" / "a", tmp_path / "killed" / "runs" / "a"

    dice = random.Random(0)
    steps = []
    for _ in range(KILLS):
        with subprocess.Popen(command("killed"), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            # From its first moments, before anything is written, to well inside the training.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.1, 1.0) * min(5.0, length / 3))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        steps.append(len(rows(killed)) if (killed / "metrics.jsonl").exists() else 0)
    assert max(steps) > 100, steps
    done = subprocess.run(command("killed"), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "killed" / "runs").iterdir()] == ["a"]

    assert rows(killed) == rows(whole)
    assert (killed / "events.jsonl").read_text() == (whole / "events.jsonl").read_text()
    for name in ("last/model.safetensors", "last/training.safetensors", "best/model.safetensors"):
        assert (killed / "checkpoints" / name).read_bytes() == (whole / "checkpoints" / name).read_bytes()
    # Every row that was ever written is still there.
    aside = [row["step"] for path in killed.glob("metrics.jsonl.after-*") for row in read_rows(path)]
    assert aside
    print(f"steps reached at the kills: {steps}; {len(aside)} rows done twice")
