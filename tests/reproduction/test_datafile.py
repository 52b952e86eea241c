"""The data file comes back as it was written, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from stability_lab.compare.run_record import RunRecord
from stability_lab.config import ConfigError
from stability_lab.reproduction.catalogue import Part, PartScale, find
from stability_lab.reproduction.datafile import data_path, read, write
from stability_lab.reproduction.evidence import KeptRun, PartEvidence, small

SCALE = PartScale(1, lrs=(1e-3, 1e-2), seeds=(0, 3))
PART = Part("n", "p", "?", {"cpu": SCALE}, arms={"qknorm": (), "none": ()}, settings={"large": ()})
NUMBERS = Part("textbook", "numbers", "?", {"cpu": PartScale(1)}, compute="numbers")
FACTS: dict[str, Any] = {"commands": ["c"], "date": "2026-01-02", "versions": {"torch": "2"}}
HEAD = {"name": "n", "part": "p", "scale": "cpu", **FACTS}


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


def test_values_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    head = FACTS | {"name": "textbook", "part": "numbers", "scale": "cpu"}
    values = {"one": 1.5, "list": [1.0, 2.0]}
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


def change(path: Path, line: int, change: Any) -> None:
    """Apply `change` to one line of the file and give it a hash that fits."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    change(lines[line])
    head, *rest = lines
    head.pop("sha256", None)
    text = "".join(json.dumps(content, sort_keys=True) + "\n" for content in (head, *rest))
    head["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text("".join(json.dumps(content, sort_keys=True) + "\n" for content in (head, *rest)), encoding="utf-8")


def test_what_was_cut_or_edited_is_refused(run: KeptRun, tmp_path: Path) -> None:
    """By its hash, whatever it is: a digit of a value, a line too few, a command."""
    path = written(tmp_path / "a.jsonl", run, dataclasses.replace(run, seed=0))
    text = path.read_text(encoding="utf-8")
    change(path, 1, lambda line: None)
    assert path.read_text(encoding="utf-8") == text
    first, second, third = text.splitlines(keepends=True)
    for damaged in (
        text.replace('"val/loss": 2.0', '"val/loss": 2.5', 1),
        first + second,
        first + third + second,
        text.replace('["c"]', '["d"]'),
        text.replace('"sha256"', '"x"'),
    ):
        assert damaged != text
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(ConfigError, match="the hash in its first line is that of another content") as refused:
            read(path, PART, "cpu")
        assert "put a good copy there, or move it away and run its part" in str(refused.value)


@pytest.mark.parametrize(
    ("line", "key", "value", "words"),
    [
        (0, "commands", None, "commands=null: must be"),
        (0, "versions", "x", "versions=x: must be a group of keys"),
        (0, "seconds", "long", "seconds=long: must be a number"),
        (0, "name", "other", "it holds other p at scale cpu"),
        (0, "scale", "full", "it holds n p at scale full"),
        (1, "lr", "fast", "lr=fast: must be a number"),
        (1, "arm", ["none"], "must be a word"),
        (1, "seed", None, "seed=null: must be a whole number"),
        (1, "manifest", [], "must be a group of keys"),
        (1, "summary", None, "summary=null: must be a group of keys"),
    ],
)
def test_each_line_is_checked_by_its_schema(
    line: int, key: str, value: Any, words: str, run: KeptRun, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", run)
    change(path, line, lambda content: content.update({key: value}))
    with pytest.raises(ConfigError) as refused:
        read(path, PART, "cpu")
    assert str(refused.value).startswith(f"{path} is damaged or of another version (")
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "{}", "[]", "null", "\n", "\ud800"])
def test_what_is_no_data_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError, match="is damaged or of another version"):
        read(path, PART, "cpu")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl", PART, "cpu")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path, PART, "cpu")


@pytest.mark.parametrize("values", [{"a": "x"}, {"a": None}, {"a": {}}, {"a": []}, {"a": [1, "x"]}])
def test_a_value_is_a_number_or_a_list_of_them(values: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, PartEvidence(FACTS | {"name": "textbook", "part": "numbers", "scale": "cpu"}, values=values))
    with pytest.raises(ConfigError, match="a value is neither a number nor a list of numbers"):
        read(path, NUMBERS, "cpu")


def test_the_catalogue_plans_what_the_committed_data_hold() -> None:
    root = Path(__file__).parents[2] / "docs" / "reproduction"
    parts = [
        part for name in ("nvidia", "olmo2", "small_scale_proxies", "textbook") for part in find(name).parts.values()
    ]
    not_run = {"kept", "sizes", "seeds"}  # at any scale, and their pages say so
    assert {part.part for part in parts if not data_path(part, "cpu", root).exists()} == not_run
    for part in parts:
        if part.part in not_run:
            continue
        evidence = read(data_path(part, "cpu", root), part, "cpu")
        assert len(evidence.runs) == len(part.runs_at("cpu"))
