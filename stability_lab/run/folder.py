"""Names and folders of runs and sweeps: made from what varies, safe in any shell, unique by a short hash."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stability_lab.config import ConfigError, in_run_name
from stability_lab.disk.files import other_kind, read_text
from stability_lab.disk.lock import LOCK, Held, Lock, acquire

CONFIG, MANIFEST, SUMMARY = "config.yaml", "manifest.json", "summary.json"  # of a run
_FILES = (".yaml", ".json", ".jsonl", ".log", ".safetensors")
LONGEST = 96
SINGLE_RUNS = "runs"
_FIRST = {"optimizer.lr": 0, "seed": 1}


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("e+", "e")).strip("-.")


def run_name(stabilizers: Iterable[str], overrides: Iterable[tuple[str, str]], fingerprint: str) -> str:
    """`qknorm-zloss_lr0.03_seed1_0a1b2c3d`: stabilizers, what else was asked for, and the run's fingerprint."""
    parts = ["-".join(sorted(stabilizers)) or "none"]
    for key, value in sorted(overrides, key=lambda pair: (_FIRST.get(pair[0], len(_FIRST)), pair[0])):
        head, _, rest = key.partition(".")
        if head == "stabilizer":
            parts += [slug(f"{rest}{value}")] if rest else []
        elif in_run_name(key):
            parts.append(slug(f"{key.split('.')[-1]}{value}"))
    return _with_hash(parts, fingerprint[:8])


def sweep_name(keys: Iterable[str], fingerprints: Iterable[str]) -> str:
    """`sweep_stabilizer_lr_0a1b2c3d`: what is swept, and a hash of all that its runs compute, whatever the order."""
    digest = hashlib.sha256("\0".join(sorted(set(fingerprints))).encode()).hexdigest()
    ordered = sorted(keys, key=lambda key: (key != "stabilizer", key))
    return _with_hash(["sweep", *(slug(key.split(".")[-1]) for key in ordered)], digest[:8])


def _with_hash(parts: list[str], digest: str) -> str:
    return f"{'_'.join(parts)[: LONGEST - len(digest) - 1]}_{digest}"


class InUse(ConfigError):
    """Another process works in the folder of a run."""

    def __init__(self, path: Path, holder: object):
        super().__init__(f"{path} is in use by {holder}: wait for it, or stop it first")
        self.path = path


class FolderClaim(NamedTuple):
    """A run's folder. `lock` is held, and None where the run is already finished; `resumes`: its run goes on."""

    path: Path
    lock: Lock | None = None
    resumes: bool = False


def claim_directory(path: Path, if_exists: str, fingerprint: str) -> FolderClaim:
    """Make the folder of a run and lock it, or find the run that is already there; ConfigError naming a living holder.

    `new`: path, else path-2, path-3, ... `skip`: a finished run of this fingerprint is left alone, an unfinished one
    goes on, else as `new`. `resume`: the same, but the folder of another run is claimed too, for its differences to be
    named. `error`: ConfigError where it exists. `overwrite`: what is there is removed, if it is a run.
    """
    if if_exists in ("skip", "resume"):
        siblings = [sibling for sibling in _siblings(path, fingerprint) if _is_of(sibling, fingerprint)]
        if path not in siblings and if_exists == "resume" and (path / CONFIG).is_file():
            return claim_run(path)
        for sibling in siblings:
            if _finished(sibling, fingerprint):
                return FolderClaim(sibling)
        for sibling in siblings:
            claim = claim_run(sibling)
            if _finished(sibling, fingerprint):  # since we looked
                assert claim.lock is not None
                claim.lock.release()
                return FolderClaim(sibling)
            return claim
        if not path.exists():  # another process may do the same at this moment
            make_folder(path)
        if path.is_dir() and not (path / CONFIG).is_file():
            held = lock(path)
            if _is_unused(path):  # new, or of a process that died before it had written anything
                return FolderClaim(path, held)
            held.release()
        if path not in siblings and _is_of(path, fingerprint):  # since we looked
            return claim_directory(path, if_exists, fingerprint)
    if if_exists == "overwrite" and path.exists():
        if not (path / CONFIG).is_file():
            raise ConfigError(f"if_exists=overwrite: {path} is not a run's folder, so it is left alone")
        held = lock(path)
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != LOCK:
                child.unlink()
        return FolderClaim(path, held)
    if if_exists == "error" and path.exists():
        raise ConfigError(f"if_exists=error: {path} exists; use if_exists=new for a second run beside it")
    made = new_directory(path)
    return FolderClaim(made, lock(made))


def claim_run(path: Path) -> FolderClaim:
    """Lock the run in `path` to go on with it. ConfigError where there is none, or where a process holds it."""
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is not a run's folder: it has no {CONFIG}")
    _check_kind(path / LOCK)
    held = lock(path)  # before the other files, which a process that holds it may rename meanwhile
    try:
        for file in (*path.iterdir(), *(path / "checkpoints").glob("**/*")):
            _check_kind(file)
    except BaseException:
        held.release()
        raise
    return FolderClaim(path, held, resumes=True)


def _check_kind(file: Path) -> None:
    """ConfigError for what would write somewhere else, or would keep whoever opens it waiting."""
    if file.is_symlink():
        raise ConfigError(f"{file} is a symbolic link, and a run's folder has none: it is not written to")
    if (file.suffix in _FILES or not file.is_dir()) and (kind := other_kind(file)) is not None:
        raise ConfigError(f"{file} is {kind}, and a run's folder has none: remove it")


def new_directory(path: Path) -> Path:
    """`path`, else path-2, path-3, ...: the first that does not exist, made."""
    make_folder(path.parent)
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output_dir: cannot create {candidate}: {error.strerror}") from error
    raise AssertionError


def make_folder(path: Path) -> None:
    """The folder in which runs are made, and those above it. ConfigError where something else is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        dangling = next((link for link in (path, *path.parents) if link.is_symlink() and not link.exists()), None)
        if dangling is not None:
            raise ConfigError(
                f"output_dir and group: {dangling} is a link to {os.readlink(dangling)}, which leads nowhere: make "
                "that folder or remove the link"
            ) from error
        raise ConfigError(f"output_dir and group: cannot create {path}: {error.strerror}") from error


def lock(path: Path) -> Lock:
    """ConfigError where another process holds the folder, or where nothing can be written there."""
    try:
        return acquire(path)
    except Held as held:
        raise InUse(path, held) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be locked: {error.strerror}") from error


def is_finished(summary: Mapping[str, Any]) -> bool:
    return summary.get("status") in ("completed", "diverged")


def finished_in(folder: Path) -> dict[str, Path]:
    """The runs in a folder that have a result, by fingerprint: those that a sweep would not make again."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        digest = read_object(path / MANIFEST).get("fingerprint")
        if isinstance(digest, str) and is_finished(read_object(path / SUMMARY)):
            found[digest] = path
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _siblings(path: Path, fingerprint: str) -> list[Path]:
    """Folders in which a run of this fingerprint may be: of this name, or of another sweep's, which named it after
    other keys but ended it with the same hash."""
    if not path.parent.is_dir():
        return []
    named = (*path.parent.glob(f"{glob.escape(path.name)}-*"), *path.parent.glob(f"*_{fingerprint[:8]}*"))
    return [path, *sorted(folder for folder in set(named) - {path} if folder.is_dir())]


def _finished(path: Path, fingerprint: str) -> bool:
    known = read_object(path / MANIFEST).get("fingerprint")
    return known == fingerprint and is_finished(read_object(path / SUMMARY))


def _is_of(path: Path, fingerprint: str) -> bool:
    """Whether a run of this fingerprint is in a folder; one that died before its manifest goes by the folder's name."""
    return (path / CONFIG).is_file() and read_object(path / MANIFEST).get("fingerprint", fingerprint) == fingerprint


def _is_unused(path: Path) -> bool:
    """An empty folder, or one with nothing but a lock, temporary files and files without a word."""
    if not path.is_dir():
        return False
    return all(file.is_file() and (file.name.startswith(".") or not file.stat().st_size) for file in path.iterdir())
