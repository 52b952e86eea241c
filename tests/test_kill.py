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
    "trainer.max_steps=500",
    "trainer.eval_every=100",
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


def size(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def wait_for_rows(run: Path, before: int, process: subprocess.Popen[bytes]) -> None:
    """Until metrics.jsonl has another size: it grows with the next rows, or shrinks by those that are set aside."""
    deadline = time.monotonic() + 60
    while size(run) == before:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_twenty_kills_at_any_moment(tmp_path: Path, tiny_overrides: tuple[str, ...]) -> None:
    def command(output: str) -> list[str]:
        words = [*tiny_overrides, *HARD, f"output_dir={output}"]
        return [sys.executable, "-m", "stability_lab", "train", *words]

    whole, killed = tmp_path / "whole" / "runs" / "a", tmp_path / "killed" / "runs" / "a"
    started = time.monotonic()
    with subprocess.Popen(command("whole"), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_for_rows(whole, 0, process)
        start_s = time.monotonic() - started
        assert process.wait(240) == 0
    training_s = time.monotonic() - started - start_s

    dice = random.Random(0)
    reached = []
    for kill in range(KILLS):
        before = size(killed)
        with subprocess.Popen(command("killed"), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            # Every second kill falls somewhere in the start, the others in the training, however busy the machine is.
            if kill % 2:
                wait_for_rows(killed, before, process)
                time.sleep(dice.uniform(0, training_s / 12))
            else:
                time.sleep(dice.uniform(0, start_s))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        reached.append(len(rows(killed)) if (killed / "metrics.jsonl").exists() else 0)
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
