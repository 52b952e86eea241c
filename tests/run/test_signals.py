"""Ctrl-C and SIGTERM: once is a checkpoint, twice is at once, and neither loses anything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch._inductor.exc import CppCompileError

from stability_lab.run.signals import EXIT_CODES, Interruption, Terminated, interruption
from stability_lab.tracking.run_files import read_rows
from stability_lab.training.checkpoint import Checkpoints
from stability_lab.training.step import TrainStep

pytestmark = pytest.mark.usefixtures("in_the_foreground")
LONG = ("trainer.max_steps=9", "trainer.log_every=5", "trainer.checkpoint_every=2", "run_name=a", "model.dropout=0.1")


def at_step(step: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of the given step."""
    steps, call = iter(range(1, 1000)), TrainStep.__call__

    def stepping(self: TrainStep, *arguments: Any) -> Any:
        if next(steps) == step:
            action()
        return call(self, *arguments)

    patch.setattr(TrainStep, "__call__", stepping)


def send(*numbers: signal.Signals) -> Callable[[], None]:
    def action() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return action


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def rows(run: Path) -> list[str]:
    read = read_rows(run / "metrics.jsonl")
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("perf/")}) for row in read]


def checkpoint_step(run: Path) -> int:
    return json.loads((run / "checkpoints" / "last" / "state.json").read_text(encoding="utf-8"))["step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_overrides, run_command) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run_command("train", *tiny_overrides, *LONG, f"output_dir={folder}").code == 0
    return folder / "runs" / "a"


CASES = [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word", "code"), CASES)
def test_once_finishes_the_step_and_writes_a_checkpoint(
    here: Path, whole: Path, tiny_overrides, run_command, monkeypatch, capfd, number, word, code
) -> None:
    with monkeypatch.context() as patch:
        at_step(7, send(number), patch)
        shown = run_command("train", *tiny_overrides, *LONG)
    run = here / "outputs" / "runs" / "a"
    assert shown.code == code
    assert (summary(run)["status"], summary(run)["ended_by"], summary(run)["steps"]) == ("interrupted", word, 7)
    assert checkpoint_step(run) == 7
    assert f"{word}: finishing this step and a checkpoint; again stops at once" in capfd.readouterr().out
    assert "to go on: python -m stability_lab train resume=outputs/runs/a" in shown.out
    assert run_command("train", "resume=outputs/runs/a").code == 0
    assert rows(run) == rows(whole)
    weights = [load_file(r / "checkpoints" / "last" / "model.safetensors") for r in (run, whole)]
    assert all(weights[0][name].equal(value) for name, value in weights[1].items())
    assert not list(run.glob("*.after-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "word", "code"), CASES)
def test_twice_stops_at_once_and_leaves_the_checkpoint_before(
    here: Path, whole: Path, tiny_overrides, run_command, monkeypatch, number, word, code
) -> None:
    with monkeypatch.context() as patch:
        at_step(7, send(number, number), patch)
        shown = run_command("train", *tiny_overrides, *LONG)
    run = here / "outputs" / "runs" / "a"
    assert shown.code == code
    assert (summary(run)["status"], summary(run)["ended_by"], summary(run)["steps"]) == ("interrupted", word, 6)
    assert checkpoint_step(run) == 6
    assert run_command("train", "resume=outputs/runs/a").code == 0
    assert rows(run) == rows(whole)


@pytest.mark.slow
def test_the_second_one_inside_a_checkpoint_leaves_the_one_before(
    here: Path, whole: Path, tiny_overrides, run_command, monkeypatch
) -> None:
    save = Checkpoints.save

    def interrupted(self: Checkpoints, state: Any, halfway: Callable[[], None]) -> bool:
        return save(self, state, send(signal.SIGINT, signal.SIGINT) if state.plain["step"] == 6 else halfway)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", interrupted)
        shown = run_command("train", *tiny_overrides, *LONG)
    run = here / "outputs" / "runs" / "a"
    assert shown.code == 130
    assert checkpoint_step(run) == 4
    assert len(rows(run)) == 6
    assert run_command("train", "resume=outputs/runs/a").code == 0
    assert rows(run) == rows(whole)


def test_once_before_the_first_step_stops_at_once(here: Path, tiny_overrides, run_command, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stability_lab.run.job.build_run", lambda *_: send(signal.SIGTERM)())
        shown = run_command("train", *tiny_overrides, *LONG)
    assert shown.code == 143
    assert summary(here / "outputs" / "runs" / "a") == {
        "status": "interrupted",
        "exit_code": 143,
        "ended_by": "SIGTERM",
    }


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 1)])
def test_a_compiler_that_the_same_signal_ended(
    here: Path, tiny_overrides, run_command, monkeypatch, number: signal.Signals | None, code: int, wrapped: bool
) -> None:
    """A signal to the process group reaches g++ too, and torch calls that an error."""
    error = CppCompileError(["g++", "a.cpp"], "g++: fatal error: Terminated signal terminated program cc1plus")

    def compiling() -> None:
        if number is not None:
            os.kill(os.getpid(), number)
        raise RuntimeError(f"{type(error).__name__}: {error}") if wrapped else error

    with monkeypatch.context() as patch:
        at_step(3, compiling, patch)
        shown = run_command("train", *tiny_overrides, *LONG)
    run = here / "outputs" / "runs" / "a"
    assert (shown.code, summary(run)["status"]) == (code, "interrupted" if number else "failed")
    assert checkpoint_step(run) == 2


@pytest.mark.slow
def test_once_more_while_the_last_words_are_written(here: Path, tiny_overrides, run_command, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stability_lab.training.loop.Loop.judge", lambda _: send(signal.SIGTERM)())
        at_step(3, send(signal.SIGTERM), patch)
        shown = run_command("train", *tiny_overrides, *LONG)
    assert shown.code == 143
    run = here / "outputs" / "runs" / "a"
    assert checkpoint_step(run) == 3
    assert not (run / ".lock").exists()
    assert run_command("train", "resume=outputs/runs/a").code == 0


def ended(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "jobs.jsonl") if row["event"] == "ended"]


@pytest.mark.slow
def test_an_interruption_ends_a_sweep_and_its_command_completes_it(
    here: Path, whole: Path, tiny_overrides, run_command, monkeypatch
) -> None:
    words = ("train", "-m", "sweep.workers=1", *tiny_overrides, *LONG[:3], LONG[4], "seed=1,0,2", "group=mine")
    with monkeypatch.context() as patch:
        at_step(9 + 5, send(signal.SIGINT), patch)
        assert run_command(*words).code == 130
    folder = here / "outputs" / "mine"
    jobs = ended(folder)
    assert [job["status"] for job in jobs] == ["completed", "interrupted"]
    again = run_command(*words)
    assert again.code == 0
    assert [job["skipped"] for job in ended(folder)[2:]] == [True, False, False]
    assert again.out.count("the run goes on after step 5") == 1
    assert [job["status"] for job in ended(folder)[2:]] == ["completed"] * 3
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 3
    assert rows(Path(jobs[1]["path"])) == rows(whole)


def test_the_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruption() as stop:
        assert signal.getsignal(signal.SIGINT) is stop
        assert signal.getsignal(signal.SIGTERM) is stop
        stop.can_wait = True
        send(signal.SIGTERM)()
        assert stop.asked()
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)()
        assert stop.reason == "Ctrl-C"
        with pytest.raises(Terminated):
            send(signal.SIGTERM)()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_background_job_keeps_ignoring_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruption() as stop:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert isinstance(stop, Interruption)
    finally:
        signal.signal(signal.SIGINT, before)


SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@pytest.mark.parametrize("number", SCHEDULERS)
def test_the_warning_of_a_scheduler_and_a_closed_terminal_count_as_sigterm(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interruption, "told", True)
    before = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL)
    try:
        with interruption() as outer, interruption() as stop:
            stop.can_wait = True
            send(number)()
            assert (stop.reason, outer.reason) == (number.name, None)
            assert EXIT_CODES[number.name] == 143
            with pytest.raises(Terminated):
                send(number)()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SCHEDULERS)
def test_what_a_launcher_or_nohup_has_set_stays(number: signal.Signals) -> None:
    calls: list[int] = []
    before = signal.getsignal(number)
    try:
        for handler in (signal.SIG_IGN, lambda n, _: calls.append(n)):
            signal.signal(number, handler)
            with interruption() as stop:
                send(number)()
                assert stop.reason is None
        assert calls == [number]
    finally:
        signal.signal(number, before)
