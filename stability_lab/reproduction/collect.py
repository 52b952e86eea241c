"""From a part's runs to its data file and figures."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stability_lab import __version__
from stability_lab.compare.comparison import compare
from stability_lab.compare.figures import draw
from stability_lab.compare.run_record import RunRecord
from stability_lab.config import ConfigError, config_dir
from stability_lab.reproduction import jobs
from stability_lab.reproduction.catalogue import Part
from stability_lab.reproduction.datafile import FIGURES, data_path, read, write
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, by_delta, small
from stability_lab.text import shown


def collect(part: Part, scale: str, made: Sequence[jobs.Sweep], out: Path) -> str:
    """Write data and figures of a part. A sentence where runs are missing: what is known is never replaced by less.

    OSError where something cannot be written.
    """
    there = jobs.there(part, scale, made)
    runs = jobs.collected(made, there.runs)
    planned = len(part.runs_at(scale))
    told = ""
    if len(runs) < planned:
        again = "makes what is damaged again, once its folder is deleted" if there.faults else "tries the others again"
        told = f"{part.part}: {len(runs)} of {planned} runs have a result; the same command {again}"
        if why := _would_lose(part, scale, out, runs):
            return f"{told}; {why}"
    if runs:
        records = [run.record for run in runs]
        kept = [small(record, part.injected) for record in records]
        head = _head(part, scale) | {"commands": [sweep.command for sweep in made], **_facts(records)}
        head["figures"] = _draw(part, runs, kept, out / FIGURES / jobs.group_of(part, scale))
        write(data_path(part, scale, out), PartEvidence(head, tuple(runs)), kept)
    return told


def _would_lose(part: Part, scale: str, out: Path, runs: Sequence[KeptRun]) -> str:
    """Why the data that are there must not be replaced by those of `runs`; empty where they may be."""
    path = data_path(part, scale, out)
    if not path.exists():
        return ""
    try:
        known = {_key(run) for run in read(path, part, scale).runs if run.record.ended}
    except ConfigError as error:
        return f"{error}: it stays as it is"
    gone = len(known - {_key(run) for run in runs})
    return f"{shown(path)} has {gone} of the others and stays as it is" if gone else ""


def _key(run: KeptRun) -> tuple[object, ...]:
    return run.setting, run.arm, run.lr, run.seed


def compute(part: Part, scale: str, out: Path) -> str:
    """Compute the values of a part that trains nothing, and write them. OSError where that cannot be done."""
    began = time.monotonic()
    values = _values(part, scale)
    head = _head(part, scale) | {
        "commands": [f"python -m stability_lab reproduce {part.name} --part {part.part} --scale {scale}"],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": _versions(),
        "seconds": round(time.monotonic() - began, 1),
    }
    write(data_path(part, scale, out), PartEvidence(head, values=values))
    return ""


def _head(part: Part, scale: str) -> dict[str, Any]:
    return {"name": part.name, "part": part.part, "scale": scale}


def _values(part: Part, scale: str) -> Mapping[str, float | list[float]]:
    if part.compute == "numbers":
        from stability_lab.reproduction.numbers import numbers

        return numbers()
    from hydra import initialize_config_dir

    from stability_lab.compose import compose_job
    from stability_lab.reproduction.growth import growth

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose_job(["trainer.device=cpu"]).config
    at = part.at(scale)
    return growth(config, at.widths, at.layers, at.tokens, at.seeds)


def _facts(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Of the runs as a whole: when, on what, with what, and how long. Where they differ all values are named."""

    def all_of(group: str, key: str) -> str | None:
        groups = (record.manifest.get(group) for record in records)
        found = {str(node[key]) for node in groups if isinstance(node, Mapping) and node.get(key) is not None}
        return ", ".join(sorted(found)) or None

    seconds = [
        tokens / speed
        for record in records
        if (tokens := record.metric("tokens")) and (speed := record.metric("tokens_per_s"))
    ]
    return {
        "date": max(str(record.manifest.get("created", "")) for record in records)[:10],
        "device": ", ".join(sorted({str(record.manifest.get("device")) for record in records})),
        "versions": {name: all_of("versions", name) for name in ("stability_lab", "torch", "python")},
        "git": all_of("git", "revision"),
        "seconds": round(sum(seconds), 1),
    }


def _versions() -> dict[str, str]:
    import torch

    return {"stability_lab": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _draw(part: Part, runs: Sequence[KeptRun], kept: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw the figures with the part's names for arms and the values of `kept`; their files relative to the page."""
    named = []
    for run, values in zip(runs, kept, strict=True):
        record = run.record
        summary = by_delta(record.summary, part.delta)
        summary |= {"final": {**(record.summary.get("final") or {}), **values["summary"]["final"]}}
        named.append(replace(record, config={**record.config, "stabilizer": {run.arm: {}}}, summary=summary))
    if not any(record.ended and not record.diverged for record in named):
        return []
    baseline = next(arm for arm in part.arms if any(run.arm == arm for run in runs))
    drawn = draw(
        compare(named, part.metric, by=("stabilizer",), baseline=baseline), folder, only=part.figures, option="--out"
    )
    two = [record for record, run in zip(named, runs, strict=True) if run.arm in part.pair]
    if len({run.arm for run in runs} & set(part.pair)) == 2:
        drawn += draw(compare(two, part.metric, by=("stabilizer",)), folder / "pair", only=("curves",), option="--out")
    return [path.relative_to(folder.parent.parent).as_posix() for path in drawn]
