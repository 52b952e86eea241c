"""Checkpoints on disk: whole or not at all, never a weight that is not finite, and the one before as a reserve."""

import contextlib
import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stability_lab.model.init import fingerprints
from stability_lab.training import checkpoint
from stability_lab.training.checkpoint import (
    CheckpointError,
    Checkpoints,
    State,
    adopt,
    find_newest,
    find_weights,
    is_resumable,
    load_weights,
    save_weights,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", ["true", "false"])
def test_round_trip(tiny_run, tmp_path, tied):
    ours, other = (tiny_run(f"model.tied_head={tied}", f"seed={seed}").model for seed in (0, 1))
    assert save_weights(ours, tmp_path / "a" / "last")
    load_weights(other, tmp_path / "a" / "last", CPU)
    assert fingerprints(other) == fingerprints(ours)
    assert names(tmp_path / "a") == ["last"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(tiny_run, tmp_path, value):
    good, bad = tiny_run().model, tiny_run("seed=1").model
    assert save_weights(good, tmp_path / "last")
    with torch.no_grad():
        bad.blocks[1].mlp.w_up.weight[3, 3] = value
    assert not save_weights(bad, tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
    load_weights(bad, tmp_path / "last", CPU)
    assert fingerprints(bad) == fingerprints(good)


def test_failure_while_writing_keeps_the_old_weights(tiny_run, tmp_path, monkeypatch):
    old, new = tiny_run().model, tiny_run("seed=1").model
    assert save_weights(old, tmp_path / "last")

    def half_written(state, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", half_written)
        with pytest.raises(OSError, match="No space left"):
            save_weights(new, tmp_path / "last")
    load_weights(new, tmp_path / "last", CPU)
    assert fingerprints(new) == fingerprints(old)
    # What is left over does not stop the next attempt.
    newer = tiny_run("seed=2").model
    assert save_weights(newer, tmp_path / "last")
    load_weights(new, tmp_path / "last", CPU)
    assert fingerprints(new) == fingerprints(newer)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_damaged_and_foreign_files_are_told_apart_from_missing_ones(tiny_run, tmp_path):
    model = tiny_run().model
    with pytest.raises(FileNotFoundError):
        load_weights(model, tmp_path / "none", CPU)
    assert save_weights(tiny_run("model.d_model=16").model, tmp_path / "foreign")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not a file of weights")
    before = fingerprints(model)
    for name in ("foreign", "damaged"):
        with pytest.raises(ValueError, match=f"{name}/model.safetensors does not hold this model's weights"):
            load_weights(model, tmp_path / name, CPU)
    assert fingerprints(model) == before


def state(step: int, weight: float | None = None) -> State:
    """A small state whose every part says its step."""
    value = torch.full((3,), float(step) if weight is None else weight)
    return State({"w": value}, {"optimizer/step/w": value, "series/step": value.double()}, {"step": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found_step(folder: Path) -> int | None:
    """The step that a run would go on from, after checking that all parts belong together."""
    newest = find_newest(folder)
    if newest.state is None:
        return None
    step = newest.state.plain["step"]
    assert torch.equal(newest.state.model["w"], torch.full((3,), float(step)))
    assert torch.equal(newest.state.training["series/step"], torch.full((3,), float(step), dtype=torch.float64))
    return step


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30]), (9, [10, 20, 30])])
def test_so_many_are_kept(tmp_path, keep, left):
    writer = Checkpoints(tmp_path, 10, keep, {"fingerprint": "0a1b"})
    for step in (10, 20, 30):
        assert writer.save(state(step))
    assert names(tmp_path) == ["last", *(f"step-{step:06d}" for step in left[:-1])]
    assert found_step(tmp_path) == 30
    plain = json.loads((tmp_path / "last" / "state.json").read_text())
    assert (plain["fingerprint"], plain["step"], sorted(plain["files"])) == (
        "0a1b",
        30,
        ["model.safetensors", "training.safetensors"],
    )


def test_the_files_of_the_run_come_to_the_disk_first(tmp_path):
    order: list[str] = []
    writer = Checkpoints(tmp_path, 1, 1, before=lambda: order.append("rows"))
    writer.save(state(1), lambda: order.append("half"))
    assert order == ["rows", "half"]


def test_last_never_holds_weights_that_are_not_finite(tmp_path):
    writer = Checkpoints(tmp_path, 1, 2)
    assert writer.save(state(1))
    assert not writer.save(state(2, math.nan))
    assert not writer.save_best({"w": torch.tensor(math.inf)}, 2, {"val/loss": 1.0})
    assert names(tmp_path) == ["last"]
    assert found_step(tmp_path) == 1


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path):
    writer = Checkpoints(tmp_path, 1, 2)
    assert not is_resumable(tmp_path)
    assert writer.save_best({"w": torch.zeros(1)}, 1, {"val/loss": 1.0})
    assert not is_resumable(tmp_path)
    assert writer.save(state(1))
    assert writer.save_last_weights({"w": torch.zeros(1)}, 2)
    assert is_resumable(tmp_path)
    assert names(tmp_path) == ["best", "last", "step-000001"]
    newest = find_newest(tmp_path)
    assert (newest.path, newest.damaged) == (tmp_path / "step-000001", {})
    adopt(newest)
    assert names(tmp_path) == ["best", "last", "last.old"]
    assert found_step(tmp_path) == 1


class Death(BaseException):
    """In place of a kill: nothing catches it, so nothing is cleaned up."""


def dying_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Die at the given one of the calls that change the disk, half of the time before and half after it."""
    count = iter(range(1, 1000))

    def fatal(function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if next(count) == call:
                raise Death
            result = function(*arguments, **options)
            if next(count) == call:
                raise Death
            return result

        return wrapped

    patch.setattr(checkpoint, "save_file", fatal(checkpoint.save_file))
    patch.setattr(checkpoint.os, "fsync", fatal(os.fsync))
    patch.setattr(checkpoint.shutil, "rmtree", fatal(shutil.rmtree))
    for method in ("rename", "write_text", "mkdir"):
        patch.setattr(Path, method, fatal(getattr(Path, method)))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_process_may_die_at_any_moment(tmp_path, monkeypatch, keep):
    """At each single operation on the disk: a whole checkpoint is left, and the run goes on from it."""
    ends = set()
    for call in range(1, 200):
        folder = tmp_path / str(call)
        for step in (1, 2):
            assert Checkpoints(folder, 1, keep).save(state(step))
        with monkeypatch.context() as patch:
            dying_at(call, patch)
            try:
                Checkpoints(folder, 1, keep).save(state(3))
                survived = True
            except Death:
                survived = False
        step = found_step(folder)
        assert step in (2, 3)
        ends.add(step)
        with contextlib.suppress(OSError, ValueError):  # what was to become `last`, if it is whole
            assert checkpoint.read(folder / "last.new").plain["step"] == step
        assert find_newest(folder).damaged == {}
        weights = find_weights(folder, "last")
        assert weights is not None
        adopt(find_newest(folder))
        assert found_step(folder) == step
        assert Checkpoints(folder, 1, keep).save(state(4))
        assert found_step(folder) == 4
        assert len(names(folder)) == keep
        if survived:
            break
    assert survived
    assert call > 20
    assert ends == {2, 3}


def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path, monkeypatch):
    writer = Checkpoints(tmp_path, 1, 2)
    assert writer.save(state(1))
    write = checkpoint.save_file

    def full(tensors, path):
        write(tensors, path)
        if path.name == "training.safetensors":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"^the checkpoint of step 2 could not be written: No space left on dev"):
        writer.save(state(2))
    assert names(tmp_path) == ["last"]
    assert found_step(tmp_path) == 1


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


class Trap:
    """Unpickling it would make a file."""

    def __reduce__(self):
        return open, ("sprung", "w")


@pytest.mark.parametrize("how", ["truncated", "flipped", "pickle", "empty", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, monkeypatch, name, how):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        Checkpoints(folder, 1, 2).save(state(step))
    if name == "state.json" and how == "flipped":
        content = (folder / "last" / name).read_text().replace('"step": 2', '"step": -2')
        (folder / "last" / name).write_text(content)
    else:
        damage(folder / "last" / name, how)
    newest = find_newest(folder)
    assert newest.path == folder / "step-000001"
    assert list(newest.damaged) == [folder / "last"]
    assert name in newest.damaged[folder / "last"]
    adopt(newest)
    assert names(folder) == ["damaged-1", "last"]
    assert found_step(folder) == 1
    Checkpoints(folder, 1, 2).save(state(2))
    assert names(folder) == ["damaged-1", "last", "step-000001"]
    assert not (tmp_path / "sprung").exists()


def test_pickles_beside_a_checkpoint_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    Checkpoints(folder, 1, 2).save(state(1))
    for place in (folder / "optimizer.pt", folder / "last" / "training.pt", folder / "last" / "data.pkl"):
        place.write_bytes(pickle.dumps(Trap()))
    assert found_step(folder) == 1
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap())).close()  # the trap does work
    assert (tmp_path / "sprung").exists()


def test_nothing_to_go_on_from(tmp_path):
    assert find_newest(tmp_path / "none") == (None, None, {})
    assert find_weights(tmp_path / "none", "last") is None
    (tmp_path / "last.new").mkdir()
    (tmp_path / "last.new" / "model.safetensors").write_bytes(b"half")
    assert find_newest(tmp_path) == (None, None, {})
    assert find_weights(tmp_path, "last") is None


def test_auto_is_a_minute_and_longer_where_writing_takes_long(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    writer = Checkpoints(tmp_path, "auto", 1)

    def wait_until_due() -> float:
        started = now[0]
        while not writer.due(7):
            now[0] += 1
        return now[0] - started

    def slow() -> None:
        now[0] += 4

    assert wait_until_due() == 60
    writer.save(state(1))
    assert wait_until_due() == 60
    writer.save(state(2), slow)
    assert wait_until_due() == 200


def test_due_by_steps_or_only_at_the_end(tmp_path):
    assert [step for step in range(1, 10) if Checkpoints(tmp_path, 3, 1).due(step)] == [3, 6, 9]
    assert not any(Checkpoints(tmp_path, None, 1).due(step) for step in range(1, 10))
