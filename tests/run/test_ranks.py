"""One run in several processes: real torchrun, gloo, against the same run in one process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stability_lab import cli
from stability_lab.config import ConfigError
from stability_lab.training.launched import Launched, launched

ROOT = Path(__file__).parents[2]
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
WORDS = (
    *("model.d_model=32", "model.n_layers=2", "model.n_heads=4", "model.seq_len=16", "trainer.device=cpu"),
    *("trainer.micro_batch_size=4", "trainer.grad_accum_steps=2", "trainer.eval_sequences=8", "tracking=local"),
    *("schedule=constant", "schedule.warmup_steps=2", "optimizer.lr=3e-3", "trainer.grad_clip=0.5"),
    *("+stabilizer=[qknorm,zloss]", "trainer.checkpoint_every=5", "trainer.log_every=5"),
)
# Sums in another order; what they change in the first step, and what becomes of it in twenty.
ROUNDING, GROWN = 1e-5, 1e-3


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_curves(run: Path, alone: Path) -> None:
    """All that a step measures, and what is measured between steps in both runs."""
    rows, expected = rows_of(run), rows_of(alone)
    assert len(rows) == len(expected) > 0
    for row, other in zip(rows, expected, strict=True):
        assert {"train/loss", "train/z_loss", "optim/grad_norm", "attn/logit_bound"} <= row.keys()
        for key in (row.keys() & other.keys()) - {"perf/tokens_per_s"}:
            near = ROUNDING if row["step"] <= 2 else GROWN
            assert row[key] == pytest.approx(other[key], rel=near, abs=near), (row["step"], key)


def command(ranks: int, *words: str, parallel: str = "ddp") -> list[str]:
    start = [sys.executable]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = (*words, f"trainer.parallel={parallel}")
    return [*start, "-m", "stability_lab", "train", *words]


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(ranks: int, *words: str, parallel: str = "ddp") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(ranks, *words, parallel=parallel), cwd=tmp_path, capture_output=True, text=True, timeout=180
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "fsdp2"), (4, "ddp")])
def test_a_run_equals_that_of_one_process(train: Any, tmp_path: Path, ranks: int, parallel: str) -> None:
    for n, name in ((1, "alone"), (ranks, "ranks")):
        done = train(n, *WORDS, "trainer.max_steps=20", f"run_name={name}", parallel=parallel)
        assert done.returncode == 0, done.stdout + done.stderr
    alone, run = (tmp_path / "outputs" / "runs" / name for name in ("alone", "ranks"))
    assert_same_curves(run, alone)
    manifest, expected = (json.loads((path / "manifest.json").read_text()) for path in (run, alone))
    assert manifest["init"] == expected["init"]
    assert manifest["data"] == expected["data"]
    assert (manifest["ranks"], expected["ranks"]) == (ranks, 1)
    assert done.stdout.count("status ") == 1, "only rank 0 speaks"


@pytest.mark.slow
def test_it_goes_on_with_another_number_of_ranks(train: Any, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "runs" / "parts"
    assert train(1, *WORDS, "trainer.max_steps=18", "run_name=alone").returncode == 0
    killed = train(2, *WORDS, "trainer.max_steps=18", "run_name=parts", "debug.inject=kill@8", parallel="fsdp2")
    assert killed.returncode != 0
    assert len(rows_of(run)) == 5
    assert train(1, f"resume={run}", "trainer.parallel=off", "trainer.max_steps=12").returncode == 0
    done = train(4, f"resume={run}", "trainer.max_steps=18")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 4 (was 1)" in done.stdout
    assert_same_curves(run, run.with_name("alone"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_on_two_ranks(parallel: str, tmp_path: Path) -> None:
    """Every stabilizer, a NaN on one rank, equal weights under dropout: see rank_cases.py."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("rank_cases.py")
    done = subprocess.run([*start, str(script), parallel], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def ranks_below(launcher: subprocess.Popen[str], n: int) -> dict[int, int]:
    """Rank -> process id, once all `n` are there."""
    found: dict[int, int] = {}
    for _ in range(300):
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True)
        for pid in listed.stdout.split():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(entry[5:]): int(pid) for entry in environ if entry.startswith(b"RANK=")}
        if len(found) == n:
            return found
        time.sleep(0.1)
    raise AssertionError(f"only ranks {sorted(found)} started")


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """A long run on two ranks, which has come to its first rows."""
    words = (*WORDS, "trainer.max_steps=100000", "run_name=long")
    # Not the test's own group: what is sent to torchrun must not reach pytest.
    launcher = subprocess.Popen(
        command(2, *words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    run = tmp_path / "outputs" / "runs" / "long"
    try:
        for _ in range(600):
            if (run / "metrics.jsonl").is_file() and rows_of(run):
                break
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.1)
        yield launcher, run
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_all(started: Any, victim: int) -> None:
    launcher, run = started
    os.kill(ranks_below(launcher, 2)[victim], signal.SIGKILL)
    shown, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert f"rank      : {victim} (local_rank: {victim})" in shown.split("Root Cause")[1]
    assert rows_of(run)
    if victim == 1:
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] in ("failed", "interrupted")
        assert "to go on: python -m stability_lab train resume=" in shown


@pytest.mark.slow
def test_sigterm_ends_all_with_a_checkpoint(started: Any) -> None:
    launcher, run = started
    launcher.terminate()
    launcher.communicate(timeout=60)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ended_by"]) == ("interrupted", "SIGTERM")
    state = json.loads((run / "checkpoints" / "last" / "state.json").read_text())
    assert state["step"] == rows_of(run)[-1]["step"]


@pytest.mark.parametrize(
    ("environ", "words", "said"),
    [
        (TWO, [], "WORLD_SIZE=2 with trainer.parallel=off: torchrun has started 2 processes"),
        (TWO, ["trainer.parallel=ddp", "-m", "seed=0,1"], "WORLD_SIZE=2 with -m"),
        (TWO, ["trainer.parallel=ddp", "trainer.micro_batch_size=3"], "the 3 sequences of a step must be a multiple"),
        (TWO, ["trainer.parallel=ddp", "trainer.compile=full"], "trainer.compile=full: goes without"),
        (TWO, ["trainer.parallel=fsdp2", "optimizer=sgd"], "trainer.parallel=fsdp2: divides only"),
        (TWO, ["trainer.parallel=fsdp2", "trainer.compile=block"], "trainer.compile=block: was not made"),
        ({}, ["trainer.parallel=ddp"], "trainer.parallel=ddp: needs several processes"),
        ({"WORLD_SIZE": "two"}, [], "WORLD_SIZE=two"),
        (TWO | {"RANK": ""}, ["trainer.parallel=ddp"], "RANK=: must be a number"),
        ({}, ["trainer.parallel=dp"], "trainer.parallel=dp"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    environ: dict[str, str], words: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["train", "tracking=local", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {said}" if not said.startswith("the ") else "error: trainer.")
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_process_of_a_machine_speaks(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (TWO | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert cli.run(["train", "tracking=local"]) == 2
    assert capsys.readouterr() == ("", "")


def test_what_torchrun_says() -> None:
    assert launched({}) == launched({"WORLD_SIZE": "1"}) == Launched()
    assert launched(TWO | {"RANK": "1"}) == Launched(1, 2, 0, 2)
    with pytest.raises(ConfigError, match="LOCAL_RANK=x"):
        launched(TWO | {"LOCAL_RANK": "x"})
