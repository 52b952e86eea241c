"""The data file comes back as it was written, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.config import ConfigError
from stability_lab.reproduction.catalogue import Part, PartScale, find
from stability_lab.reproduction.datafile import damage, data_path, read, write
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, small

SCALE = PartScale(1, lrs=(1e-3, 1e-2), seeds=(0, 3))
PART = Part("n", "p", "?", {"cpu": SCALE}, arms={"qknorm": (), "none": ()}, settings={"large": ()})
NUMBERS = Part("textbook", "numbers", "?", {"cpu": PartScale(1)}, compute="numbers")
FACTS: dict[str, Any] = {"commands": ["c"], "date": "2026-01-02", "versions": {"torch": "2"}}
HEAD = {"name": "n", "part": "p", "scale": "cpu", **FACTS}
ALONE = json.dumps({**HEAD, "lines": 0})
ONE = json.dumps({**HEAD, "lines": 1})
EXACT, SAMPLE = "logz_10_5_0", "entropy_factor_2"


@pytest.fixture
def run() -> KeptRun:
    summary: dict[str, Any] = {
        "status": "completed",
        "verdict": "stable",
        "sensitivity": {"0.5": "diverged", "1": "stable", "2": "stable"},
        "steps": 10,
        "tokens": 100,
        "initial": {"val/loss": 5.5},
        "final": {"val/loss": 2.0, "attn/scale/L00": 1.0, "act/rms/L00": math.inf, "x": math.nan},
        "scores": {"grad_norm": {"olmo2": {"score": 0.5, "n_spikes": 1, "n_scored": 200, "steps": [3]}}},
    }
    data = {"fingerprint": "d", "first_batch": "f", "last_batch": "l", "validation": "v", "documents": 3}
    manifest = {"created": "2026-01-02T", "argv": ["secret"], "data": data}
    config = {"optimizer": {"lr": 1e-3}, "seed": 3, "stabilizer": {}, "model": {"d_model": 4}}
    return KeptRun("qknorm", "large", 1e-3, 3, RunRecord(Path("nowhere"), config, manifest, summary))


def written(path: Path, *runs: KeptRun, **head: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    write(path, PartEvidence(HEAD | head, runs), [small(run.record) for run in runs])
    return path


def test_what_is_written_is_read_back(run: KeptRun, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", run, seconds=3.5)
    found = read(path, PART, "cpu")
    assert {key: value for key, value in found.head.items() if value} == HEAD | {"seconds": 3.5}
    assert found.values == {}
    (own,) = found.runs
    assert (own.arm, own.setting, own.lr, own.seed) == ("qknorm", "large", 1e-3, 3)
    assert own.metric("val/loss") == 2.0
    assert own.metric("x") is None
    assert own.record.metric("act/rms/L00") == math.inf
    assert own.record.initial("val/loss") == 5.5
    assert own.record.score("grad_norm", "olmo2")["n_scored"] == 200
    assert own.record.manifest["data"]["first_batch"] == "f"
    text = path.read_bytes()
    assert b"secret" not in text
    assert b"attn/scale/L00" not in text
    assert len(text) < 3000
    assert read(written(path, run, seconds=None), PART, "cpu").head["seconds"] is None
    path.write_bytes(text + b"\n\n")
    assert len(read(path, PART, "cpu").runs) == 1


def test_values_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    head = FACTS | {"name": "textbook", "part": "numbers", "scale": "cpu"}
    values = {EXACT: 1.5, "list": [1.0, 2.0]}
    write(path, PartEvidence(head, values=values))
    assert read(path, NUMBERS, "cpu").values == values


def test_d_decides_what_diverged(run: KeptRun, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", run)

    def of(delta: float) -> KeptRun:
        return read(path, dataclasses.replace(PART, delta=delta), "cpu").runs[0]

    assert of(0.5).record.diverged
    assert of(0.5).metric("val/loss") is None
    assert not of(1.0).record.diverged
    summary = {**run.record.summary, "status": "diverged", "verdict": "diverged"}
    written(path, dataclasses.replace(run, record=dataclasses.replace(run.record, summary=summary)))
    assert not of(2.0).record.diverged


def put(target: Any, path: str, value: Any) -> None:
    *keys, last = path.split(".")
    for key in keys:
        target = target[key]
    if value is None:
        del target[last]
    else:
        target[last] = value


@pytest.mark.parametrize(
    ("line", "path", "value", "words"),
    [
        (0, "commands", 3, "line 1, commands: input should be a valid list"),
        (0, "figures", 3, "line 1, figures: input should be a valid list"),
        (0, "versions", "x", "line 1, versions"),
        (0, "seconds", "long", "line 1, seconds: input should be a valid number"),
        (0, "seconds", -1, "line 1, seconds: input should be greater than or equal to 0"),
        (0, "date", "\ud800", "it has a line that is not JSON in UTF-8"),
        (0, "name", "other", "it holds other p cpu instead of n p cpu"),
        (0, "part", "other", "it holds n other cpu instead of n p cpu"),
        (0, "scale", "full", "it holds n p full instead of n p cpu"),
        (1, "lr", "fast", "line 2, lr: input should be a valid number"),
        (1, "lr", 0.5, "a run of qknorm@large at 0.5 with seed 3, which the part has not"),
        (1, "arm", ["none"], "line 2, arm: input should be a valid string"),
        (1, "arm", "softcap", "a run of softcap@large at 0.001 with seed 3, which the part has not"),
        (1, "setting", "small", "which the part has not"),
        (1, "seed", 7, "with seed 7, which the part has not"),
        (1, "seed", "3", "line 2, seed: input should be a valid integer"),
        (1, "seed", 0, "a run of qknorm@large at 0.001 with seed 0 twice"),
        (1, "manifest", [], "line 2, manifest"),
        (1, "manifest.data", 3, "line 2, manifest.data"),
        (1, "config.seed", "x", "line 2, config.seed"),
        (1, "config.optimizer.lr", {}, "line 2, config.optimizer.lr"),
        (1, "summary.final", [], "line 2, summary.final"),
        (1, "summary.final.val/loss", "low", "line 2, summary.final.val/loss: input should be a valid number"),
        (1, "summary.scores.grad_norm.olmo2.n_spikes", "x", "olmo2.n_spikes: input should be a valid integer"),
        (1, "summary", None, "line 2, summary: field required"),
        (1, "summary.final", {}, "line 2, summary.final has no val/loss"),
        (1, "summary.steps", None, "line 2, summary.steps: field required"),
        (1, "manifest.data.first_batch", None, "line 2, manifest.data.first_batch: field required"),
    ],
)
def test_what_was_changed_is_refused(
    line: int, path: str, value: Any, words: str, run: KeptRun, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.jsonl", run, dataclasses.replace(run, seed=0))
    lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    put(lines[line], path, value)
    file.write_text("".join(json.dumps(content) + "\n" for content in lines), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read(file, PART, "cpu")
    told = str(refused.value)
    assert told.startswith(f"{file} is damaged or of another version: ")
    assert words in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("{", "it has a line that is not JSON"),
        ("[" * 100_000, "it has a line that is not JSON"),
        ("{}", "line 1, name: field required"),
        ("[]", "line 1, input should be"),
        ("null", "line 1, input should be"),
        (json.dumps(HEAD), "line 1, lines: field required"),
        (ALONE, "it holds no run"),
        (ONE, "it has 0 of 1 lines after the first"),
        (ALONE + "\n{}", "it has 1 of 0 lines after the first"),
        (ONE + "\n[2]", "line 2, input should be"),
        (ONE + '\n{"values": {"a": 1}}', "line 2, config: field required"),
    ],
)
def test_what_is_no_data_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read(path, PART, "cpu")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl", PART, "cpu")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path, PART, "cpu")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (None, "it holds no value"),
        ({}, "it holds no value"),
        ([], "line 2, values"),
        ({"a": "x"}, "line 2, values.a: it should be a number, or a list of numbers"),
        ({"a": None}, "line 2, values.a"),
        ({"a": {}}, "line 2, values.a"),
        ({"a": []}, "line 2, values.a"),
        ({"a": [1, "x"]}, "line 2, values.a"),
        ({"a": [1, 2], "b": [1]}, "its lists differ in length"),
        ({EXACT: [1, 2]}, f"{EXACT} is a list, not a number"),
        ({SAMPLE: 3}, f"{SAMPLE} is a number, not a list"),
        ({SAMPLE: [1, "nan"]}, f"{SAMPLE} has a number that is not finite"),
        ({EXACT: "nan"}, f"{EXACT} has a number that is not finite"),
    ],
)
def test_values_that_are_none_are_refused(values: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    head = FACTS | {"name": "textbook", "part": "numbers", "scale": "cpu"}
    lines = [head | {"lines": 0}] if values is None else [head | {"lines": 1}, {"values": values}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read(path, NUMBERS, "cpu")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("config.seed", "word", "config.seed: input should be a valid integer"),
        ("config.optimizer", None, "config.optimizer: field required"),
        ("manifest.data", None, "manifest.data: field required"),
        ("manifest.created", None, "manifest.created: field required"),
        ("summary.final", None, "summary.final: field required"),
        ("summary.final", [], "summary.final: input should be a valid dictionary"),
        ("summary.final", {}, "summary.final has no val/loss"),
        ("summary.sensitivity", None, "summary.sensitivity: field required"),
        ("summary.steps", None, "summary.steps: field required"),
    ],
)
def test_a_run_whose_files_lack_something_is_told(path: str, value: Any, words: str, run: KeptRun) -> None:
    assert damage(run.record) == ""
    files = {name: json.loads(json.dumps(getattr(run.record, name))) for name in ("config", "manifest", "summary")}
    put(files, path, value)
    assert damage(RunRecord(Path("folder"), **files)) == f"folder: {words}"


def test_a_failed_write_leaves_what_was_there(run: KeptRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.jsonl", run)
    first = path.read_bytes()

    def full(_: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        written(path, run, seconds=9)
    assert path.read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_catalogue_plans_what_the_committed_data_hold() -> None:
    root = Path(__file__).parents[2] / "docs" / "reproduction"
    parts = [
        part for name in ("nvidia", "olmo2", "small_scale_proxies", "textbook") for part in find(name).parts.values()
    ]
    for part in parts:
        evidence = read(data_path(part, "cpu", root), part, "cpu")
        assert len(evidence.runs) == len(part.runs_at("cpu"))
