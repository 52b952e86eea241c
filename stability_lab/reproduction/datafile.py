"""The data file of a part: one JSON object a line, first on the part, then of each run, or of what was computed.

It is read as strictly as it is written, since verdicts rest on it: what is damaged, or of another part, is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from stability_lab.compare.run_record import RunRecord, number
from stability_lab.compare.tables import words_for_nonfinite
from stability_lab.config import ConfigError
from stability_lab.disk.files import replace_file
from stability_lab.reproduction.catalogue import Part, claims_of
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, by_delta
from stability_lab.text import shown


def _number(value: Any) -> Any:
    """JSON has no NaN: its word is read as one; what is no number is left to be refused."""
    return value if (found := number(value)) is None else found


def _value(value: Any) -> float | list[float]:
    found = [number(item) for item in value] if isinstance(value, list) else [number(value)]
    known = [item for item in found if item is not None]
    if not found or len(known) < len(found):
        raise ValueError("it should be a number, or a list of numbers")
    return known if isinstance(value, list) else known[0]


DATA, FIGURES = "data", "figures"  # below the folder of the page

Number = Annotated[float, BeforeValidator(_number)]
Maybe = Annotated[float | None, BeforeValidator(_number)]
Texts = dict[str, str | None]


class _DataLine(BaseModel):
    model_config = ConfigDict(strict=True)


_Kind = TypeVar("_Kind", bound=_DataLine)


class _Head(_DataLine):
    name: str
    part: str
    scale: str
    commands: list[str] = Field(min_length=1)
    date: str
    versions: Texts
    device: str | None = None
    git: str | None = None
    seconds: Annotated[Annotated[float, Field(ge=0, le=1e9)] | None, BeforeValidator(_number)] = None
    figures: list[str] = []
    # That follow: a file cut between two lines looks whole.
    lines: int = Field(ge=0, le=1_000_000)


class _Score(_DataLine):
    score: Maybe = None
    n_spikes: int | None = None
    n_scored: int | None = None


class _Summary(_DataLine):
    status: str
    verdict: str | None = None
    sensitivity: dict[str, str]
    steps: int
    tokens: int
    initial: dict[str, Maybe]
    final: dict[str, Maybe]
    scores: dict[str, dict[str, _Score]]


class _Optimizer(_DataLine):
    lr: Number


class _Config(_DataLine):
    optimizer: _Optimizer
    seed: int
    stabilizer: dict[str, Any]


class _Data(_DataLine):
    fingerprint: str
    first_batch: str
    last_batch: str
    validation: str


class _Manifest(_DataLine):
    created: str
    data: _Data


class _Files(_DataLine):
    """Of a run that has ended: what its files must say, and so what is kept of them."""

    config: _Config
    manifest: _Manifest
    summary: _Summary

    @model_validator(mode="after")
    def _has_a_loss(self) -> _Files:
        if self.summary.status != "diverged" and self.summary.final.get("val/loss") is None:
            raise ValueError("summary.final has no val/loss")
        return self


class _Run(_Files):
    arm: str
    setting: str
    lr: Maybe
    seed: int


class _Values(_DataLine):
    values: dict[str, Annotated[Any, PlainValidator(_value)]]


def data_path(part: Part, scale: str, out: Path) -> Path:
    return out / DATA / f"{part.name}_{part.part}_{scale}.jsonl"


def write(path: Path, evidence: PartEvidence, kept: Sequence[Mapping[str, Any]] = ()) -> None:
    """Replace `path`; `kept` are the runs' `small` dicts, in the order of `evidence.runs`. OSError where that fails."""
    lines: list[dict[str, Any]] = [{"values": dict(evidence.values)}] if evidence.values else []
    for run, content in zip(evidence.runs, kept, strict=True):
        lines.append({"arm": run.arm, "setting": run.setting, "lr": run.lr, "seed": run.seed, **content})
    lines.insert(0, {**evidence.head, "lines": len(lines)})
    text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in words_for_nonfinite(lines))
    replace_file(path, text)


def read(path: Path, part: Part, scale: str) -> PartEvidence:
    """ConfigError where the file cannot be read, is damaged, or is not of this part at this scale."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        json.dumps(lines, ensure_ascii=False).encode()  # half of a surrogate pair is valid JSON
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it has a line that is not JSON in UTF-8") from error
    if not lines:
        raise _damaged(path, "it is empty")
    head = _checked(path, 1, _Head, lines[0])
    if head.lines != len(lines) - 1:
        raise _damaged(path, f"it has {len(lines) - 1} of {head.lines} lines after the first")
    runs, values = [], {}
    for n, line in enumerate(lines[1:], 2):
        if part.compute is None:
            own = _checked(path, n, _Run, line)
            record = RunRecord(path, line["config"], line["manifest"], by_delta(line["summary"], part.delta))
            runs.append(KeptRun(own.arm, own.setting, own.lr, own.seed, record))
        else:
            values |= _checked(path, n, _Values, line).values
    evidence = PartEvidence(head.model_dump(exclude={"lines"}), tuple(runs), values)
    if why := _foreign(evidence, part, scale):
        raise _damaged(path, why)
    return evidence


def _checked(path: Path, n: int, kind: type[_Kind], line: Any) -> _Kind:
    try:
        return kind.model_validate(line)
    except ValidationError as error:
        raise _damaged(path, f"line {n}, {_told(error)}") from error


def damage(record: RunRecord) -> str:
    """What is wrong in the configuration, manifest and summary of a run that has ended; empty where nothing is."""
    try:
        _Files.model_validate({name: getattr(record, name) for name in ("config", "manifest", "summary")})
    except ValidationError as error:
        return f"{shown(record.path)}: {shown(_told(error))}"
    return ""


def _told(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(key) for key in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what[:1].lower()}{what[1:]}" if where else what[:1].lower() + what[1:]


def _foreign(evidence: PartEvidence, part: Part, scale: str) -> str:
    """Why these are not the data of this part at this scale; empty where they are."""
    head = evidence.head
    own, asked = (head["name"], head["part"], head["scale"]), (part.name, part.part, scale)
    if own != asked:
        return f"it holds {' '.join(own)} instead of {' '.join(asked)}"
    if part.compute is not None:
        tests = [claim.test for claim in claims_of(part)]
        numbers = {test["value"] for test in tests if test["kind"] == "exact"}
        samples = {test[side] for test in tests if test["kind"] in ("samples", "equivalence") for side in "ab"}
        lists = {name: value for name, value in evidence.values.items() if isinstance(value, list)}
        if not evidence.values:
            return "it holds no value"
        if wrong := sorted(lists.keys() & numbers):
            return f"{wrong[0]} is a list, not a number"
        if wrong := sorted(samples & evidence.values.keys() - lists.keys()):
            return f"{wrong[0]} is a number, not a list"
        every = {name: value if isinstance(value, list) else [value] for name, value in evidence.values.items()}
        if wrong := sorted(name for name, value in every.items() if not all(map(math.isfinite, value))):
            return f"{wrong[0]} has a number that is not finite"
        return "its lists differ in length" if len({len(value) for value in lists.values()}) > 1 else ""
    planned, seen = set(part.runs_at(scale)), set()
    for run in evidence.runs:
        key = run.setting, run.arm, run.lr, run.seed
        arm = f"{run.arm}@{run.setting}" if run.setting else run.arm
        words = f"a run of {arm}" + ("" if run.lr is None else f" at {run.lr:g}") + f" with seed {run.seed}"
        if key not in planned:
            return f"it holds {words}, which the part has not"
        if key in seen:
            return f"it holds {words} twice"
        seen.add(key)
    return "" if seen else "it holds no run"


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{shown(path)} is damaged or of another version: {shown(why)}; put a good copy there, or move it "
        "away and run its part"
    )
