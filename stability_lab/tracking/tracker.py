"""The contract between a training run and a service that mirrors its numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger("stability_lab")


def valid_id(value: object) -> bool:
    """Whether a file's value can be a tracker's id, which becomes part of file names."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", value) is not None


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about a run at its start.

    `config` is a plain dict and `dir` the run directory. `resume_id` is the tracker's id of the same run
    before an interruption, as stored in its files; the resumed part then carries that id.
    """

    name: str
    group: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]
    dir: Path
    notes: str | None = None
    resume_id: str | None = None


class Tracker(Protocol):
    """A mirror of one run.

    `id` is the service's id of the run, if it has one. `hint` is one line that tells how to see it there.
    """

    @property
    def id(self) -> str | None: ...

    @property
    def hint(self) -> str: ...

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of one flush, in order; each has `step` and `tokens`."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event; it is shown where it has a `step` and a name under `event`."""
        ...

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Take the final values and close the run; nothing may be logged afterwards."""
        ...


class NullTracker:
    """No mirror."""

    id: str | None = None

    def __init__(self, hint: str = "not recorded for W&B"):
        self.hint = hint

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        del rows

    def event(self, event: Mapping[str, Any]) -> None:
        del event

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        del summary, exit_code


@dataclass(frozen=True)
class LocalTracking:
    """Only the files of the run; `mode` can have no other value than `disabled`."""

    mode: str = "disabled"

    def __post_init__(self) -> None:
        if self.mode != "disabled":
            raise ValueError(f"mode is {self.mode!r}, but with tracking=local must be disabled")

    def start(self, run_info: RunInfo) -> Tracker:
        del run_info
        return NullTracker()


class Mirror:
    """A tracker whose failure costs one warning, and itself, but never the run."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker
        self.id = tracker.id
        self.hint = tracker.hint

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._call(lambda tracker: tracker.log(rows))

    def event(self, event: Mapping[str, Any]) -> None:
        self._call(lambda tracker: tracker.event(event))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._call(lambda tracker: tracker.finish(summary, exit_code))

    def _call(self, action: Callable[[Tracker], None]) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        try:
            action(tracker)
            self.hint = tracker.hint
        except Exception as error:
            self._tracker = None
            _log.warning(
                "tracking stopped (%s: %s); the run goes on and its own files stay complete",
                type(error).__name__,
                str(error).strip().split("\n")[0],
            )
