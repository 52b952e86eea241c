"""From a part's runs to its data file and figures."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stability_lab import __version__
from stability_lab.command_line import read_command_line
from stability_lab.compare.comparison import compare
from stability_lab.compare.figures import draw
from stability_lab.compare.run_record import RunRecord
from stability_lab.compose import compose_jobs
from stability_lab.reproduction import jobs
from stability_lab.reproduction.catalogue import Part
from stability_lab.reproduction.datafile import FIGURES, data_path, read, write
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, by_delta, small
from stability_lab.text import shown

Keep = Callable[[Part, RunRecord], dict[str, Any]]


def usual(part: Part, record: RunRecord) -> dict[str, Any]:
    return small(record, part.injected, part.levels)


def collect(part: Part, scale: str, made: Sequence[jobs.Sweep], out: Path, keep: Keep = usual) -> str:
    """Write data and figures of a part; a sentence where runs have no result.

    `keep` makes what is kept of a run, in the layout of its files.
    Data that hold a run which is not there any more stay as they are. OSError where something cannot be written.
    """
    runs = jobs.collected(made, jobs.finished(part, scale, made))
    planned, path = len(part.runs_at(scale)), data_path(part, scale, out)
    known = {_key(run) for run in read(path, part, scale).runs} if path.exists() else set()
    faults = []
    if len(runs) < planned:
        faults.append(f"{part.part}: {len(runs)} of {planned} runs have a result; the same command tries the others")
    if gone := len(known - {_key(run) for run in runs}):
        faults.append(f"{shown(path)} holds {gone} that are not there any more and is kept: delete it to replace it")
    elif runs:
        records = [run.record for run in runs]
        kept = [keep(part, record) for record in records]
        head = _head(part, scale) | {"commands": [sweep.command for sweep in made], **_facts(records)}
        head["figures"] = _draw(part, runs, kept, out / FIGURES / jobs.group_of(part, scale))
        write(path, PartEvidence(head, tuple(runs)), kept)
    return "; ".join(faults)


def _key(run: KeptRun) -> tuple[object, ...]:
    return run.setting, run.arm, run.lr, run.seed


def compute(part: Part, scale: str, out: Path) -> None:
    """Compute the values of a part that trains nothing, and write them. OSError where that cannot be done."""
    began = time.monotonic()
    values = _values(part, scale)
    head = _head(part, scale) | {
        "commands": [f"python -m stability_lab reproduce {part.name} --part {part.part} --scale {scale}"],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"stability_lab": __version__, "torch": version("torch"), "python": platform.python_version()},
        "seconds": round(time.monotonic() - began, 1),
    }
    write(data_path(part, scale, out), PartEvidence(head, values=values))


def _head(part: Part, scale: str) -> dict[str, Any]:
    return {"name": part.name, "part": part.part, "scale": scale, "excluded": dict(part.excluded) or None}


def _values(part: Part, scale: str) -> Mapping[str, float | list[float]]:
    if part.compute == "numbers":
        from stability_lab.reproduction.numbers import numbers

        return numbers()
    at, device = part.scales[scale], ["trainer.device=cpu"]
    if part.compute == "outputs":
        from stability_lab.reproduction.output_growth import output_growth

        (composed,) = compose_jobs(read_command_line([*at.overrides, *device, "trainer.threads=1"]))
        return output_growth(composed.config, at.seeds)
    from stability_lab.reproduction.growth import growth

    (composed,) = compose_jobs(read_command_line(device))
    return growth(composed.config, at.widths, at.layers, at.tokens, at.seeds)


def _facts(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Date, device, versions and seconds of the runs together. Values that differ are all listed."""

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


def _draw(part: Part, runs: Sequence[KeptRun], kept: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw the figures with the part's names for arms and the values of `kept`; their files relative to the page."""
    named = []
    for run, values in zip(runs, kept, strict=True):
        record = run.record
        summary = by_delta(record.summary, part.delta)
        summary |= {"final": {**(record.summary.get("final") or {}), **values["summary"]["final"]}}
        named.append(replace(record, config={**record.config, "stabilizer": {run.arm: {}}}, summary=summary))
    if not part.figures or not any(record.ended and not record.diverged for record in named):
        return []
    baseline = next(arm for arm in part.arms if any(run.arm == arm for run in runs))
    drawn = draw(
        compare(named, part.metric, by=("stabilizer",), baseline=baseline), folder, only=part.figures, option="--out"
    )
    two = [record for record, run in zip(named, runs, strict=True) if run.arm in part.pair]
    if len({run.arm for run in runs} & set(part.pair)) == 2:
        drawn += draw(compare(two, part.metric, by=("stabilizer",)), folder / "pair", only=("curves",), option="--out")
    return [path.relative_to(folder.parent.parent).as_posix() for path in drawn]
