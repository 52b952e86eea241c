import gzip
import json
from pathlib import Path

import pytest
import yaml

from stability_lab.tracking.wandb import end_files as wandb_files
from stability_lab.tracking.wandb.end_files import stage

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("# ours\nseed: 1\noptimizer:\n  lr: 1.0e-3\n")
    (folder / "manifest.json").write_text(json.dumps({"git": {"revision": KEY}, "argv": ["train", "seed=1"]}))
    (folder / "summary.json").write_text('{"status": "completed", "final": {"val/loss": NaN}}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": NaN}\n')
    (folder / "events.jsonl").write_text("")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "model.safetensors").write_bytes(b"weights")
    return folder


def test_copies_are_those_of_the_run_byte_for_byte(run: Path, tmp_path: Path) -> None:
    staged = stage(run, tmp_path / "into")
    names = ["config.yaml", "manifest.json", "summary.json", "metrics.jsonl", "events.jsonl"]
    assert [path.name for path in staged] == names
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == sorted(names)
    for path in staged:
        assert path.read_bytes() == (run / path.name).read_bytes()
        assert not path.is_symlink()


def test_what_is_missing_or_broken_is_left_out(run: Path, tmp_path: Path) -> None:
    (run / "manifest.json").unlink()
    (run / "events.jsonl").unlink()
    (run / "summary.json").write_text('{"status": "comp')
    (run / "config.yaml").write_text("a: [")
    assert [path.name for path in stage(run, tmp_path / "into")] == ["metrics.jsonl"]


def test_credentials_stay_at_home(run: Path, tmp_path: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"status": "failed", "ended_by": f"401 for key {KEY}"}))
    (run / "config.yaml").write_text(yaml.safe_dump({"seed": 1, "data": {"token": "a" * 40}}))
    stage(run, tmp_path / "into")
    texts = {path.name: path.read_text() for path in (tmp_path / "into").iterdir()}
    assert KEY not in texts["summary.json"]
    assert json.loads(texts["summary.json"])["status"] == "failed"
    assert "a" * 40 not in texts["config.yaml"]
    assert yaml.safe_load(texts["config.yaml"])["seed"] == 1
    assert KEY in texts["manifest.json"]  # a revision, without which the run cannot be repeated


def test_long_rows_are_compressed_and_endless_ones_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_files, "PLAIN_BYTES", 100)
    monkeypatch.setattr(wandb_files, "MOST_BYTES", 10_000)
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(100))
    (run / "metrics.jsonl").write_text(rows)
    (run / "events.jsonl").write_text(rows * 10)
    staged = {path.name: path for path in stage(run, tmp_path / "into")}
    assert gzip.decompress(staged["metrics.jsonl.gz"].read_bytes()).decode() == rows
    assert not any(name.startswith("events") for name in staged)


def test_a_full_disk_leaves_no_half(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wandb_files.shutil, "copyfileobj", full_disk)
    with pytest.raises(OSError, match="No space left"):
        stage(run, tmp_path / "into")
    assert not (tmp_path / "into").exists()
