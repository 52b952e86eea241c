"""Names and folders of runs and sweeps: made from what varies, safe in any shell, unique by a short hash."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stability_lab.config import ConfigError

LONGEST = 96
SINGLE_RUNS = "runs"
_FIRST = {"optimizer.lr": 0, "seed": 1}
_ELSEWHERE = ("stabilizer", "output_dir", "group", "run_name", "if_exists", "hydra", "tracking")


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("e+", "e")).strip("-.")


def run_name(stabilizers: Iterable[str], overrides: Iterable[tuple[str, str]], fingerprint: str) -> str:
    """`qknorm-zloss_lr0.03_seed1_0a1b2c3d`: stabilizers, what else was asked for, and the run's fingerprint."""
    parts = ["-".join(sorted(stabilizers)) or "none"]
    for key, value in sorted(overrides, key=lambda pair: (_FIRST.get(pair[0], len(_FIRST)), pair[0])):
        head, _, rest = key.partition(".")
        if head == "stabilizer" and rest:
            parts.append(slug(f"{rest}{value}"))
        elif key.split("/")[0].split(".")[0] not in _ELSEWHERE:
            parts.append(slug(f"{key.split('.')[-1]}{value}"))
    return _with_hash(parts, fingerprint[:8])


def sweep_name(keys: Iterable[str], overrides: Iterable[str]) -> str:
    """`sweep_stabilizer_lr_0a1b2c3d`: what is swept, and a hash of the whole command, whatever its order."""
    digest = hashlib.sha256("\0".join(sorted(overrides)).encode()).hexdigest()
    ordered = sorted(keys, key=lambda key: (key != "stabilizer", key))
    return _with_hash(["sweep", *(slug(key.split(".")[-1]) for key in ordered)], digest[:8])


def _with_hash(parts: list[str], digest: str) -> str:
    return f"{'_'.join(parts)[: LONGEST - len(digest) - 1]}_{digest}"


class Claim(NamedTuple):
    path: Path
    finished: bool = False  # a run of this fingerprint is already complete here, and the policy is `skip`


def claim_directory(path: Path, if_exists: str, fingerprint: str) -> Claim:
    """Make the folder of a run and own it, or say that the run is already there.

    `new`: path, else path-2, path-3, ... `skip`: as `new`, unless a finished run of this fingerprint is there.
    `error`: ConfigError where it exists. `overwrite`: what is there is removed, if it is a run.
    """
    if if_exists == "skip":
        for sibling in _siblings(path):
            if _finished(sibling, fingerprint):
                return Claim(sibling, finished=True)
    if if_exists == "overwrite" and path.exists():
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"if_exists=overwrite: {path} is not a run's folder, so it is left alone")
        shutil.rmtree(path)
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return Claim(candidate)
        except FileExistsError:
            if if_exists == "error":
                raise ConfigError(
                    f"if_exists=error: {path} exists; use if_exists=new for a second run beside it"
                ) from None
        except OSError as error:
            raise ConfigError(f"output_dir: cannot create {candidate}: {error.strerror}") from error
    raise AssertionError


def _siblings(path: Path) -> list[Path]:
    return [path, *sorted(path.parent.glob(f"{path.name}-*"))] if path.parent.is_dir() else []


def _finished(path: Path, fingerprint: str) -> bool:
    try:
        summary, manifest = (
            json.loads((path / name).read_text(encoding="utf-8")) for name in ("summary.json", "manifest.json")
        )
    except (OSError, ValueError):
        return False
    if not isinstance(summary, dict) or not isinstance(manifest, dict):
        return False
    return summary.get("status") in ("completed", "diverged") and manifest.get("fingerprint") == fingerprint
