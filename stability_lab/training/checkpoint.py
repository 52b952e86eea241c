"""Checkpoints: written beside their place, synced and renamed, so that a process may die at any moment.

    checkpoints/last/          the newest; its weights are finite
    checkpoints/step-000200/   older ones, as many as are kept
    checkpoints/best/          the weights of the lowest validation loss, and nothing else

A checkpoint is three files: `model.safetensors`; `training.safetensors` with optimizer, loss scale, random numbers and
measured series; `state.json` with all that is no array, and the hashes of the other two. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stability_lab.disk.files import open_file, read_text, why_unreadable
from stability_lab.model.transformer import GPT

FORMAT = 1
LAST, BEST = "last", "best"
MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"
AUTO_S = 60.0  # checkpoint_every=auto: so often,
AUTO_SHARE = 50  # but with so many times as long in between as writing one takes
_OLDER = re.compile(r"step-\d{6,12}")


class CheckpointError(OSError):
    """A checkpoint could not be written; the ones before it are as they were."""


class State(NamedTuple):
    """All that a run needs to go on. `plain` is JSON-able and has at least `step`."""

    model: dict[str, Tensor]
    training: dict[str, Tensor]
    plain: dict[str, Any]


class Checkpoints:
    """Writer of one run's checkpoints: `due` says when, `save` and `save_best` do it.

    `every` is a number of steps, `auto` or None (only at the end); `keep` counts `last` too. `facts` go into every
    state. `before` runs first and brings the run's other files to the disk: a state must not be newer than its rows.
    """

    def __init__(
        self,
        folder: Path,
        every: int | str | None,
        keep: int,
        facts: Mapping[str, Any] | None = None,
        before: Callable[[], None] = lambda: None,
    ):
        self.folder, self.every, self.keep = folder, every, keep
        self.facts, self.before = dict(facts or {}), before
        self._next = time.monotonic() + AUTO_S

    def due(self, step: int) -> bool:
        """After `step`; asks neither device nor disk."""
        if self.every == "auto":
            return time.monotonic() >= self._next
        return self.every is not None and step % int(self.every) == 0

    def save(self, state: State, halfway: Callable[[], None] = lambda: None) -> bool:
        """Write `last`; False, and nothing written, where a weight is not finite. CheckpointError on a full disk.

        The former `last` becomes step-N. `halfway` runs when the weights are written and the rest is not.
        """
        started = time.monotonic()
        step = state.plain["step"]
        with _as_checkpoint_error(f"the checkpoint of step {step}"):
            self.before()
            plain = {"format": FORMAT, **state.plain, **self.facts}
            written = _publish(self.folder, LAST, state.model, state.training, plain, halfway)
            if written:
                self._prune()
        now = time.monotonic()
        self._next = now + max(AUTO_S, AUTO_SHARE * (now - started))
        return written

    def save_best(self, model: dict[str, Tensor], step: int, measured: Mapping[str, float]) -> bool:
        with _as_checkpoint_error(f"the weights of step {step}"):
            return _publish(self.folder, BEST, model, None, {"format": FORMAT, "step": step, **measured})

    def save_last_weights(self, model: dict[str, Tensor], step: int) -> bool:
        """`last` without what it takes to go on: of a run that a step which is not finite has ended."""
        with _as_checkpoint_error(f"the weights of step {step}"):
            written = _publish(self.folder, LAST, model, None, {"format": FORMAT, "step": step})
            if written:
                self._prune()
            return written

    def _prune(self) -> None:
        for older in _older(self.folder)[max(self.keep - 1, 0) :]:
            shutil.rmtree(older)


def weights_of(model: GPT) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def save_weights(model: GPT, folder: Path) -> bool:
    """Write folder/model.safetensors as a checkpoint without its other parts; False where a weight is not finite."""
    return _publish(folder.parent, folder.name, weights_of(model), None, {"format": FORMAT})


def find_weights(folder: Path, name: str) -> Path | None:
    """folder/name with its weights; where a process died between the renames that replace it, what is to become it."""
    candidates = (folder / name, folder / f"{name}.new")
    return next((path for path in candidates if (path / MODEL).is_file() and _is_published(path)), None)


def load_weights(model: GPT, folder: Path, device: torch.device) -> None:
    """Load folder/model.safetensors; OSError or ValueError where it is missing, of another model, or not what was
    written. A checkpoint of an old version has no state.json and so no hash."""
    path = folder / MODEL
    if (folder / STATE).exists():
        hashes = _state_of(folder).get("files")
        if not isinstance(hashes, dict) or MODEL not in hashes:
            raise ValueError(f"{folder / STATE} does not state the hash of {MODEL}: the checkpoint is damaged")
        if _sha256(path) != hashes[MODEL]:
            raise ValueError(f"{path} does not hold this model's weights: its hash is not the one that {STATE} states")
    try:
        tensors = load_file(path, device=str(device))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} does not hold this model's weights: it is no file of safetensors") from error
    try:
        put_weights(model, tensors)
    except ValueError as error:
        raise ValueError(f"{path} does not hold this model's weights: {error}") from error


def put_weights(model: GPT, tensors: Mapping[str, Tensor]) -> None:
    """Put weights into a model; ValueError naming the first tensor that is missing, of another shape or one too many,
    and then the model is as it was."""
    own = model.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors:
            raise ValueError(f"{name} is missing, of shape {_shape(own[name])} in the model")
        if name not in own:
            raise ValueError(f"{name} of shape {_shape(tensors[name])} has no place in the model")
        if tensors[name].shape != own[name].shape:
            raise ValueError(f"{name} has shape {_shape(tensors[name])}, and {_shape(own[name])} in the model")
    model.load_state_dict(tensors)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "0-d"


class FoundCheckpoint(NamedTuple):
    """The newest checkpoint that can be gone on from, where there is one, and what is wrong with the others."""

    path: Path | None
    state: State | None
    damaged: dict[Path, str]


NOTHING = FoundCheckpoint(None, None, {})


def find_newest(folder: Path) -> FoundCheckpoint:
    """Read `last`, or where a process died between two renames what was to become it, or the newest before it."""
    damaged: dict[Path, str] = {}
    for path in (folder / f"{LAST}.new", folder / LAST, *_older(folder)):
        if not path.is_dir() or _is_weights_alone(path):
            continue
        try:
            return FoundCheckpoint(path, read(path), damaged)
        except (OSError, ValueError) as error:
            if path.name == f"{LAST}.new":  # that one is no checkpoint yet
                continue
            missing = isinstance(error, FileNotFoundError) and f"{Path(error.filename).name} is missing"
            damaged[path] = missing or (str(error) if isinstance(error, ValueError) else _reason(error))
    return FoundCheckpoint(None, None, damaged)


def is_resumable(folder: Path) -> bool:
    """Whether there is a checkpoint to go on from; it is not read."""
    return any((path / TRAINING).is_file() for path in (folder / LAST, *_older(folder)))


def adopt(found: FoundCheckpoint) -> None:
    """Make what was found `last`; what is damaged is renamed, so that it neither counts nor is lost."""
    for path in found.damaged:
        path.rename(_free(path.parent, "damaged"))
    if found.path is None:
        return
    last = found.path.with_name(LAST)
    if found.path != last:
        if last.exists():  # older, for found was on its way to take its place; or weights alone
            _step_aside(last)
        found.path.rename(last)
    _sync(last.parent)


def read(path: Path) -> State:
    """A checkpoint on the CPU, its hashes checked. FileNotFoundError, OSError or ValueError where it is not whole."""
    try:
        plain = json.loads(read_text(path / STATE))
    except ValueError as error:
        raise ValueError(f"{STATE} is not whole: {why_unreadable(error)}") from error
    hashes = plain.get("files") if isinstance(plain, dict) else None
    if not isinstance(hashes, dict) or not _is_step(plain.get("step")):
        raise ValueError(f"{STATE} has no step or no hashes")
    if plain.get("format") != FORMAT:
        raise ValueError(f"{STATE} has format {plain.get('format')}, and this version reads {FORMAT}")
    tensors = {}
    for name in (MODEL, TRAINING):
        if _sha256(path / name) != hashes.get(name):
            raise ValueError(f"{name} is not what was written: its hash differs")
        try:
            tensors[name] = load_file(path / name)
        except Exception as error:
            raise ValueError(f"{name} is no file of safetensors") from error
    return State(tensors[MODEL], tensors[TRAINING], plain)


def _publish(
    folder: Path,
    name: str,
    model: dict[str, Tensor],
    training: dict[str, Tensor] | None,
    plain: Mapping[str, Any],
    halfway: Callable[[], None] = lambda: None,
) -> bool:
    """Write folder/name. What was there stays until the new one is complete on disk; a resumable one becomes step-N."""
    if not all(bool(t.isfinite().all()) for t in model.values()):
        return False
    fresh, place, old = folder / f"{name}.new", folder / name, folder / f"{name}.old"
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_tensors(model, fresh / MODEL)
        halfway()
        if training is not None:
            _write_tensors(training, fresh / TRAINING)
        hashes = {path.name: _sha256(path) for path in sorted(fresh.iterdir())}
        (fresh / STATE).write_text(json.dumps({**plain, "files": hashes}) + "\n", encoding="utf-8")
        for path in (*fresh.iterdir(), fresh):
            _sync(path)
    except Exception:
        shutil.rmtree(fresh, ignore_errors=True)  # its space is needed for the run's last words
        raise
    if place.exists():
        _step_aside(place)
    fresh.rename(place)
    _sync(folder)
    shutil.rmtree(old, ignore_errors=True)
    return True


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def _step_aside(place: Path) -> None:
    """Make room for a new checkpoint: one that can be gone on from becomes step-N, weights alone are named .old."""
    state = _state_of(place)
    step = state.get("step")
    resumable = _is_step(step) and not _is_weights_alone(place)
    aside = place.with_name(f"step-{step:06d}" if resumable else f"{place.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)


def _is_weights_alone(path: Path) -> bool:
    """Whether a checkpoint holds weights without state: `best`, one after a bad step, or one of an old version."""
    files = _state_of(path).get("files")
    return TRAINING not in files if isinstance(files, dict) else [p.name for p in path.iterdir()] == [MODEL]


def _is_published(path: Path) -> bool:
    """A folder has its own name only when it is complete; under another one its last file says so."""
    return path.suffix != ".new" or bool(_state_of(path))


def _state_of(path: Path) -> dict[str, Any]:
    """state.json, or nothing where it cannot be read."""
    try:
        plain = json.loads(read_text(path / STATE))
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12


def _older(folder: Path) -> list[Path]:
    """step-N, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _OLDER.fullmatch(path.name) and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _free(folder: Path, word: str) -> Path:
    number = 1
    while (folder / f"{word}-{number}").exists():
        number += 1
    return folder / f"{word}-{number}"


def _sha256(path: Path) -> str:
    with open_file(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """One sentence for what the system, or safetensors in an error of its own, has to say."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} could not be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The system's own words, which safetensors gives as a number."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number:
        return os.strerror(int(number[1]))
    if isinstance(error, OSError):
        return error.strerror or "the system gives no reason"
    return "safetensors refuses its tensors"
