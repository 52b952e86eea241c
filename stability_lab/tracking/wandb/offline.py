"""Offline runs on their way to W&B: which there are, in which order, and the upload of one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stability_lab.disk.files import read_text
from stability_lab.tracking.run_files import METRICS
from stability_lab.tracking.wandb.wandb_tracker import SUMMARY

_FOLDER = re.compile(r"offline-run-(?P<started>\d{8}_\d{6})-(?P<id>.+)")
# A run that says that it is running and has written something since then is believed.
ALIVE_S = 600.0
_UPLOAD_TIMEOUT_S = 1800.0


class UploadError(Exception):
    """An upload that failed; the message is wandb's own."""


@dataclass(frozen=True, order=True)
class Segment:
    """One offline recording: a run, or the part of a resumed run between two starts. Sorts by the time of its start."""

    started: str
    path: Path
    run_id: str

    @property
    def log(self) -> Path:
        return self.path / f"run-{self.run_id}.wandb"

    @property
    def uploaded(self) -> bool:
        """Whether wandb has marked it; the exit code of `wandb sync` is 0 for many failures too."""
        return self.log.with_suffix(".wandb.synced").exists()


@dataclass(frozen=True)
class UploadPlan:
    """What to do with the segments found: `held` may not be uploaded now, each for a reason."""

    uploads: list[Segment]
    uploaded: list[Segment]
    held: list[tuple[Segment, str]]

    def __len__(self) -> int:
        return len(self.uploads) + len(self.uploaded) + len(self.held)


def find_segments(paths: Iterable[Path]) -> list[Segment]:
    """All offline recordings at or below `paths`, the oldest first; links to folders are not followed."""
    found = {}
    for path in paths:
        for log in [path] if path.is_file() else path.rglob("run-*.wandb"):
            folder = log.parent.resolve()
            match = _FOLDER.fullmatch(folder.name)
            if match and log.name == f"run-{match['id']}.wandb" and log.is_file():
                found[folder] = Segment(match["started"], folder, match["id"])
    return sorted(found.values())


def plan(segments: Sequence[Segment], now: float | None = None) -> UploadPlan:
    """Segments in their order, except those that would harm a run in W&B.

    A run that is being written would be marked as complete. A part that comes after one that is held, or before one
    that was uploaded already, would replace what it should stand beside.
    """
    now = time.time() if now is None else now
    uploads, uploaded, held = [], [], []
    last_uploaded = {s.run_id: s for s in segments if s.uploaded}
    waiting: set[str] = set()
    for segment in segments:
        later = last_uploaded.get(segment.run_id)
        if segment.uploaded:
            uploaded.append(segment)
        elif later is not None and later > segment:
            held.append((segment, f"a later part of this run is in W&B already and would be replaced: {later.path}"))
        elif segment.run_id in waiting:
            held.append((segment, "an earlier part of this run is not uploaded"))
        elif _is_alive(segment, now):
            waiting.add(segment.run_id)
            held.append((segment, f"it is running, or was killed less than {ALIVE_S / 60:.0f} minutes ago"))
        else:
            uploads.append(segment)
    return UploadPlan(uploads, uploaded, held)


def _is_alive(segment: Segment, now: float) -> bool:
    run = segment.path.parent.parent
    try:
        summary = json.loads(read_text(run / SUMMARY))
    except (OSError, ValueError):
        return False
    changed = max(path.stat().st_mtime for path in (segment.log, run / METRICS) if path.exists())
    return isinstance(summary, dict) and summary.get("status") == "running" and now - changed < ALIVE_S


def upload(segment: Segment, project: str | None = None, entity: str | None = None) -> None:
    """Upload one segment with `wandb sync`, which appends where it resumes a run; `UploadError` if that fails."""
    command = [sys.executable, "-P", "-m", "wandb", "sync", str(segment.log)]
    for option, value in (("--project", project), ("--entity", entity)):
        command += [option, value] if value is not None else []
    with tempfile.TemporaryDirectory(prefix="stability-lab-sync-") as logs:
        try:
            done = subprocess.run(
                command,
                env=_environment(logs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_UPLOAD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UploadError(f"wandb sync did not end within {_UPLOAD_TIMEOUT_S / 60:.0f} minutes") from error
    if done.returncode or not segment.uploaded:
        raise UploadError(_reason(done.stdout.decode(errors="replace")))


def _environment(logs: str) -> dict[str, str]:
    import wandb

    return {
        **os.environ,
        "WANDB_BASE_URL": str(wandb.setup().settings.base_url),
        "WANDB_ERROR_REPORTING": "false",
        # Its own logs would go to the working directory and to the home directory.
        "WANDB_DIR": logs,
        "WANDB_CACHE_DIR": logs,
    }


def _reason(output: str) -> str:
    lines = [line.strip().removeprefix("wandb: ") for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR ", "Error: ")) and "error logs at" not in line]
    if errors:
        return errors[-1].partition(" ")[2]
    return lines[-1] if lines else "wandb sync gives no reason"
