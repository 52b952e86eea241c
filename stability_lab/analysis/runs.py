"""Finished runs, read from their files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stability_lab.config import ConfigError


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says of itself."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]

    @property
    def stabilizers(self) -> str:
        return " + ".join(self.manifest["stabilizers"]) or "none"

    @property
    def lr(self) -> float:
        return float(self.config["optimizer"]["lr"])


def find_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """All runs at or below `paths` that got as far as their manifest, sorted by path; ConfigError if there is none."""
    paths = list(paths)
    files = sorted({file for path in paths for file in path.rglob("manifest.json")})
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))}: no run here; give a folder such as outputs/runs")
    return [read_run(file.parent) for file in files]


def read_run(path: Path) -> RunRecord:
    """The run in `path`; ConfigError where one of its files is missing or cannot be read."""
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        manifest, summary = (
            json.loads((path / name).read_text(encoding="utf-8")) for name in ("manifest.json", "summary.json")
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: its files cannot be read ({str(error).splitlines()[0]})") from error
    return RunRecord(path, config, manifest, summary)
