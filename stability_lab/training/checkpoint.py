"""Weights on disk: safetensors, written beside and renamed, never with a value that is not finite."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stability_lab.model.gpt import GPT


def save_weights(model: GPT, folder: Path) -> bool:
    """Write folder/model.safetensors; False, and nothing written, where a weight is not finite.

    The old folder stays until the new one is complete on disk.
    """
    state = {name: p.detach().cpu().contiguous() for name, p in model.state_dict().items()}
    if not all(bool(t.isfinite().all()) for t in state.values()):
        return False
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(state, fresh / "model.safetensors")
    with (fresh / "model.safetensors").open("rb") as written:
        os.fsync(written.fileno())
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return True


def load_weights(model: GPT, folder: Path, device: torch.device) -> None:
    """Load folder/model.safetensors; OSError or ValueError where it is missing, damaged or of another model."""
    path = folder / "model.safetensors"
    try:
        state = load_file(path, device=str(device))
        model.load_state_dict(state)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} does not hold this model's weights: {error}") from error
