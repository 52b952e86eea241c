"""Runs, read from their files; a run of somebody else is only ever read as data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stability_lab.config import ConfigError, by_value, in_fingerprint, typed
from stability_lab.disk.files import open_file, other_kind, read_text, why_unreadable
from stability_lab.disk.lock import abandoned
from stability_lab.judge.divergence import ABOVE_NATS
from stability_lab.text import flatten, number, shown

OPEN_GROUPS = ("data", "tokenizer")
_ENDED = ("completed", "diverged")
_OWN_FILES = frozenset(("config.yaml", "manifest.json", "metrics.jsonl", "summary.json"))

# The C parser reads 200 configurations in the time that the other needs for 10.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says of itself. `manifest` is empty for a run that ended before it was written."""

    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return shown(self.path.name)

    @property
    def stabilizers(self) -> str:
        return "+".join(sorted(map(str, self.stabilizer_options))) or "none"

    @property
    def stabilizer_options(self) -> Mapping[str, Any]:
        """The options of each stabilizer; of a log that only names them, without options."""
        options = self.config.get("stabilizer")
        if isinstance(options, Mapping):
            return options
        names = self.manifest.get("stabilizers") or []
        return {str(name): {} for name in names} if isinstance(names, list) else {}

    def options_of(self, group: str) -> Mapping[str, Any]:
        """Of a group whose options have keys of their own (a corpus, a tokenizer): class -> its keys."""
        chosen = self.config.get(group)
        if not isinstance(chosen, Mapping):
            return {}
        return {str(chosen.get("_target_", group)).rpartition(".")[2]: chosen}

    @property
    def lr(self) -> float | None:
        return number(_get(self.config, "optimizer", "lr"))

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unknown"))

    @property
    def verdict(self) -> str | None:
        verdict = self.summary.get("verdict")
        return None if verdict is None else str(verdict)

    @property
    def ended(self) -> bool:
        """Has it a result? A diverged run has one."""
        return self.status in _ENDED

    @cached_property
    def diverged(self) -> bool:
        """Also a run that ended far above its start, which older versions called `no_learning`."""
        return self.status == "diverged" or self.verdict == "diverged" or self._ended_above_start

    @property
    def outcome(self) -> str:
        """The verdict as it counts here; the status of a run without one."""
        return "diverged" if self.diverged else self.verdict or self.status

    @property
    def _ended_above_start(self) -> bool:
        initial, final = self.initial("val/loss"), self.metric("val/loss")
        return initial is not None and final is not None and final > initial + ABOVE_NATS

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All keys that this run computed from, flat, without what `options_of` has; values can be hashed."""
        flat = flatten({key: value for key, value in self.config.items() if key not in ("stabilizer", *OPEN_GROUPS)})
        return {key: hashable(value) for key, value in by_value(flat).items() if in_fingerprint(key)}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The manifest, flat."""
        return flatten(self.manifest)

    def metric(self, name: str) -> float | None:
        """A final value by the name of its column, or a number in the summary by its path (`clip_fraction`)."""
        final = self.summary.get("final")
        if isinstance(final, Mapping) and name in final:
            return _value(final[name])
        if name in self.summary:
            return _value(self.summary[name])
        return _value(_get(self.summary, *name.split(".")))

    def initial(self, name: str) -> float | None:
        return _value(_get(self.summary, "initial", name))

    def score(self, signal: str, definition: str) -> Mapping[str, Any]:
        score = _get(self.summary, "scores", signal, definition)
        return score if isinstance(score, Mapping) else {}

    def series(self, *columns: str) -> dict[str, np.ndarray]:
        """Columns of metrics.jsonl as float64 with NaN where a row has no value; empty where there is no file."""
        rows = list(_rows(self.path / "metrics.jsonl"))
        return {name: np.array([_nan(row.get(name)) for row in rows], dtype=float) for name in columns}

    def events(self, name: str) -> list[tuple[int, int]]:
        """First step and length in steps of each event of this name."""
        found = []
        for row in _rows(self.path / "events.jsonl"):
            step, length = number(row.get("step")), number(row.get("length")) or 1
            if row.get("event") == name and step is not None and math.isfinite(step) and math.isfinite(length):
                found.append((int(step), max(1, int(length))))
        return found

    def columns(self) -> list[str]:
        """Names of all columns of metrics.jsonl, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in _rows(self.path / "metrics.jsonl") for name in row))


def find_runs(paths: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
    """All runs at or below `paths`, sorted by path, and a sentence for each that cannot be read.

    ConfigError where a path is missing, or where nothing readable was found.
    """
    paths = list(dict.fromkeys(Path(path) for path in paths))
    for path in paths:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ConfigError(f"{shown(path)} {what}: give the folder of a run or of a sweep, such as outputs/runs")
    folders = sorted({folder.resolve(): folder for path in paths for folder in _folders(path)}.values())
    runs, faults = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            faults.append(str(error))
    if not runs:
        detail = f" ({faults[0]})" if faults else ""
        raise ConfigError(f"{', '.join(map(shown, paths))}: no run here{detail}; give a folder such as outputs/runs")
    return runs, faults


def of_seeds(runs: Sequence[RunRecord], seeds: Collection[int]) -> list[RunRecord]:
    """Those whose `seed` is among `seeds`; ConfigError where none is."""
    chosen = [run for run in runs if run.seed in seeds]
    if not chosen:
        known = ", ".join(map(str, sorted({run.seed for run in runs if isinstance(run.seed, int)})))
        raise ConfigError(f"--seeds: no run has one of these seeds; there are {known or 'none'}")
    return chosen


def read_run(path: Path) -> RunRecord:
    """The run in `path`; ConfigError where one of its files is missing or cannot be read.

    One whose process died before it could say how the run ended, by SIGKILL say, has the status `killed`.
    """
    config = _parsed(path / "config.yaml", lambda text: yaml.load(text, Loader=_Loader))
    summary = _parsed(path / "summary.json", json.loads)
    manifest = _parsed(path / "manifest.json", json.loads) if (path / "manifest.json").exists() else {}
    for name in ("metrics.jsonl", "events.jsonl"):
        if (kind := other_kind(path / name)) is not None:
            raise ConfigError(_unreadable(path / name, f"it is {kind} and no file"))
    for name, content in {"config.yaml": config, "manifest.json": manifest, "summary.json": summary}.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{shown(path / name)} is not the one of a run: it holds {type(content).__name__}")
    if summary.get("status") == "running" and abandoned(path):
        summary["status"] = "killed"
    return RunRecord(path, typed(config), manifest, summary)


def _parsed(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(read_text(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(_unreadable(file, why_unreadable(error))) from error


def _unreadable(file: Path, why: str) -> str:
    return f"{shown(file.parent)}: its files cannot be read ({file.name}: {why})"


def _value(value: Any) -> float | None:
    """A number of a file; beyond 1e300 no sum or square is finite, so it says no more than infinity."""
    found = number(value)
    return found if found is None or not abs(found) > 1e300 else math.copysign(math.inf, found)


def _nan(value: Any) -> float:
    found = _value(value)
    return math.nan if found is None else found


def _folders(path: Path) -> Iterator[Path]:
    """Folders of runs at or below `path`; what is inside a run (checkpoints, wandb's files) is no other run.

    A folder that lacks a file of a run is one as well, and will be named as damaged. Links are followed, once.
    """
    seen: set[str] = set()
    for folder, names, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        names.sort()
        if len(_OWN_FILES.intersection(files)) >= 2:
            names.clear()
            yield Path(folder)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a run that was killed may have left half of one."""
    try:
        with open_file(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _get(nested: Any, *path: str) -> Any:
    for key in path:
        if not isinstance(nested, Mapping):
            return None
        nested = nested.get(key)
    return nested


def hashable(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else str(value) if isinstance(value, dict) else value
