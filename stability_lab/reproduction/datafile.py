"""The data file of a part: one JSON object a line, the first on the part, then one for each run or the computed values.

The first line holds a hash of the whole file. A file that was cut or edited is refused, and so is one of another part:
verdicts rest on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.tables import words_for_nonfinite
from stability_lab.config import ConfigError, convert
from stability_lab.disk.files import replace_file
from stability_lab.reproduction.catalogue import Part
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, by_delta
from stability_lab.text import number, shown

DATA, FIGURES = "data", "figures"  # below the folder of the page

_HASH = "sha256"
_Kinds = dict[str, Any]
_GROUP = dict[str, Any]
_TEXT, _NUMBER = str | None, float | None
_HEAD: _Kinds = {"name": str, "part": str, "scale": str, "date": str, "device": _TEXT, "git": _TEXT}
_HEAD |= {"commands": list[str], "figures": list[str] | None, "versions": _GROUP, "seconds": _NUMBER}
_HEAD |= {"excluded": _GROUP | None}
_RUN: _Kinds = {"arm": str, "setting": str, "lr": _NUMBER, "seed": int}
_RUN |= {"config": _GROUP, "manifest": _GROUP, "summary": _GROUP}
_VALUES: _Kinds = {"values": _GROUP}


def data_path(part: Part, scale: str, out: Path) -> Path:
    return out / DATA / f"{part.name}_{part.part}_{scale}.jsonl"


def write(path: Path, evidence: PartEvidence, kept: Sequence[Mapping[str, Any]] = ()) -> None:
    """Replace `path`; `kept` are the runs' `small` dicts, in the order of `evidence.runs`. OSError where that fails."""
    lines: list[dict[str, Any]] = [dict(evidence.head)]
    if evidence.values:
        lines.append({"values": dict(evidence.values)})
    for run, content in zip(evidence.runs, kept, strict=True):
        lines.append({"arm": run.arm, "setting": run.setting, "lr": run.lr, "seed": run.seed, **content})
    lines = words_for_nonfinite(lines)
    lines[0][_HASH] = _digest(lines)
    replace_file(path, _text(lines))


def read(path: Path, part: Part, scale: str) -> PartEvidence:
    """ConfigError where the file cannot be read, is damaged, or is not of this part at this scale."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        head = _checked(lines[0], _HEAD)
        if lines[0].pop(_HASH, None) != _digest(lines):
            raise ValueError("the hash in its first line is that of another content")
        if (head["name"], head["part"], head["scale"]) != (part.name, part.part, scale):
            raise ValueError(f"it holds {head['name']} {head['part']} at scale {head['scale']}")
        if part.compute is not None:
            values = [_checked(line, _VALUES)["values"] for line in lines[1:]]
            return PartEvidence(head, values={name: _value(value) for each in values for name, value in each.items()})
        runs = tuple(_run(path, part, _checked(line, _RUN)) for line in lines[1:])
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, RecursionError) as error:
        raise ConfigError(
            f"{shown(path)} is damaged or of another version ({shown(error)}): put a good copy there, or move it away "
            "and run its part"
        ) from error
    return PartEvidence(head, runs)


def _run(path: Path, part: Part, line: Mapping[str, Any]) -> KeptRun:
    record = RunRecord(path, line["config"], line["manifest"], by_delta(line["summary"], part.delta))
    return KeptRun(line["arm"], line["setting"], line["lr"], line["seed"], record)


def _value(value: Any) -> float | list[float]:
    found = [number(item) for item in (value if isinstance(value, list) else [value])]
    known = [item for item in found if item is not None]
    if not known or len(known) < len(found):
        raise ValueError("a value is neither a number nor a list of numbers")
    return known if isinstance(value, list) else known[0]


def _checked(line: Any, kinds: _Kinds) -> dict[str, Any]:
    """The keys of `kinds` in a line, each of its kind; ConfigError, which is a ValueError, where one is not."""
    node = convert("line", line, _GROUP)
    return {key: convert(key, node.get(key), kind) for key, kind in kinds.items()}


def _digest(lines: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(_text(lines).encode()).hexdigest()


def _text(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)
