"""Real kills at random times: the run ends where one without a stop ends."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability_lab.tracking.run_files import read_rows

KILLS = 20
FURTHEST = 8  # steps from one kill to the next, and what a flush adds
# Dropout, accumulation, the fp16 loss scale and a schedule with a decay; checkpoints as often as once in ten steps.
HARD = (
    "model.dropout=0.1",
    "trainer.precision=fp16",
    "trainer.grad_accum_steps=2",
    "trainer.micro_batch_size=2",
    "schedule=wsd",
    "trainer.max_steps=300",
    "trainer.eval_every=80",
    "diagnostics.probe_every=70",
    "trainer.log_every=7",
    "trainer.checkpoint_every=10",
    "run_name=a",
    "if_exists=resume",
)


def rows(run: Path) -> list[dict[str, str]]:
    return [
        {k: repr(v) for k, v in row.items() if not k.startswith("perf/")} for row in read_rows(run / "metrics.jsonl")
    ]


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
def test_twenty_kills_at_any_moment(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    def command(output: str) -> list[str]:
        words = [*tiny_overrides, *HARD, f"output_dir={output}"]
        return [sys.executable, "-m", "stability_lab", "train", *words]

    whole, killed = tmp_path / "whole" / "runs" / "a", tmp_path / "killed" / "runs" / "a"
    started = time.monotonic()
    subprocess.run(command("whole"), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=240)
    whole_s = time.monotonic() - started

    dice = random.Random(0)
    reached = []
    for _ in range(KILLS):
        before, until = lines(killed), time.monotonic() + dice.uniform(0, whole_s)
        with subprocess.Popen(command("killed"), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            # At a random time, and before it has come so far that there would be nothing left for the kills to come.
            while time.monotonic() < until and lines(killed) < before + FURTHEST:
                time.sleep(dice.uniform(0, 0.02))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        reached.append(lines(killed))
    assert max(reached) > 50, reached
    done = subprocess.run(command("killed"), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "killed" / "runs").iterdir()] == ["a"]

    assert rows(killed) == rows(whole)
    assert (killed / "events.jsonl").read_text() == (whole / "events.jsonl").read_text()
    for name in ("last/model.safetensors", "last/training.safetensors", "best/model.safetensors"):
        assert (killed / "checkpoints" / name).read_bytes() == (whole / "checkpoints" / name).read_bytes()
    # Every row that was ever written is still there.
    aside = [row["step"] for path in killed.glob("metrics.jsonl.after-*") for row in read_rows(path)]
    assert aside
    print(f"rows at the kills: {reached}; {len(aside)} rows were done twice")
