"""Weights on disk: whole or not at all, and never a value that is not finite."""

import math

import pytest
import torch

from stability_lab.model.init import fingerprints
from stability_lab.training import checkpoint
from stability_lab.training.checkpoint import load_weights, save_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", ["true", "false"])
def test_round_trip(tiny_run, tmp_path, tied):
    ours, other = (tiny_run(f"model.tied_head={tied}", f"seed={seed}").model for seed in (0, 1))
    assert save_weights(ours, tmp_path / "a" / "last")
    load_weights(other, tmp_path / "a" / "last", CPU)
    assert fingerprints(other) == fingerprints(ours)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["last"]


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
