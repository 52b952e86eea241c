import json
import os
from pathlib import Path

import pytest

from stability_lab.tracking.wandb import offline as wandb_sync
from stability_lab.tracking.wandb.offline import ALIVE_S, UploadError, UploadPlan, find_segments, plan, upload


def offline_run(run: Path, started: str, run_id: str, *, synced: bool = False) -> Path:
    folder = run / "wandb" / f"offline-run-{started}-{run_id}"
    folder.mkdir(parents=True)
    log = folder / f"run-{run_id}.wandb"
    log.write_bytes(b"log")
    if synced:
        log.with_suffix(".wandb.synced").touch()
    return folder


def planned(*paths: Path, now: float | None = None) -> UploadPlan:
    return plan(find_segments(paths), now)


def names(segments) -> list[str]:
    return [segment.path.name for segment in segments]


def test_oldest_first_with_the_parts_of_a_run_in_order(tmp_path: Path) -> None:
    offline_run(tmp_path / "sweep" / "b", "20260103_000000", "b-1")
    offline_run(tmp_path / "sweep" / "a", "20260102_235959", "lr0.003-1")
    offline_run(tmp_path / "sweep" / "a", "20260104_000000", "lr0.003-1")
    offline_run(tmp_path / "runs" / "c", "20251231_000000", "c-1", synced=True)
    found = planned(tmp_path)
    assert names(found.uploads) == [
        "offline-run-20260102_235959-lr0.003-1",
        "offline-run-20260103_000000-b-1",
        "offline-run-20260104_000000-lr0.003-1",
    ]
    assert names(found.uploaded) == ["offline-run-20251231_000000-c-1"]
    assert found.held == []


def test_a_run_is_found_from_any_folder_above_or_by_itself_and_once(tmp_path: Path) -> None:
    folder = offline_run(tmp_path / "a", "20260101_000000", "a-1")
    log = folder / "run-a-1.wandb"
    for path in (folder, folder.parent, tmp_path / "a", tmp_path, log):
        assert [segment.log for segment in find_segments([path])] == [log]
    assert len(find_segments([tmp_path, folder, log])) == 1


def test_what_is_no_offline_run_is_passed_over(tmp_path: Path) -> None:
    online = tmp_path / "wandb" / "run-20260101_000000-x"
    online.mkdir(parents=True)
    (online / "run-x.wandb").touch()
    other = tmp_path / "wandb" / "offline-run-20260101_000000-y"
    other.mkdir()
    (other / "run-z.wandb").touch()
    (tmp_path / "run-w.wandb").touch()
    real = offline_run(tmp_path / "elsewhere" / "a", "20260101_000000", "a")
    (tmp_path / "wandb" / "latest-run").symlink_to(real)
    assert find_segments([tmp_path / "wandb"]) == []


def test_a_running_run_waits_and_so_do_its_later_parts(tmp_path: Path) -> None:
    folder = offline_run(tmp_path / "a", "20260101_000000", "a-1")
    offline_run(tmp_path / "a", "20260102_000000", "a-1")
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "running"}))
    written = (folder / "run-a-1.wandb").stat().st_mtime
    found = planned(tmp_path, now=written + ALIVE_S - 60)
    assert found.uploads == []
    assert "running" in found.held[0][1]
    assert "earlier part" in found.held[1][1]
    # Killed: it says running for ever, but writes no more.
    assert len(planned(tmp_path, now=written + ALIVE_S + 60).uploads) == 2


def test_fresh_metrics_count_as_running_too(tmp_path: Path) -> None:
    folder = offline_run(tmp_path / "a", "20260101_000000", "a-1")
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "running"}))
    (tmp_path / "a" / "metrics.jsonl").touch()
    os.utime(folder / "run-a-1.wandb", (0, 0))
    now = (tmp_path / "a" / "metrics.jsonl").stat().st_mtime
    assert len(planned(tmp_path, now=now + 60).held) == 1
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "completed"}))
    assert len(planned(tmp_path, now=now + 60).uploads) == 1


def test_an_early_part_never_replaces_a_later_one(tmp_path: Path) -> None:
    offline_run(tmp_path / "a", "20260101_000000", "a-1")
    offline_run(tmp_path / "a", "20260102_000000", "a-1", synced=True)
    offline_run(tmp_path / "a", "20260103_000000", "a-1")
    found = planned(tmp_path)
    assert names(found.uploads) == ["offline-run-20260103_000000-a-1"]
    ((held, reason),) = found.held
    assert held.started == "20260101_000000"
    assert "would be replaced" in reason


FAKE_WANDB = """
import os, pathlib, sys
words = sys.argv[1:]
notes = [*words, os.environ["WANDB_DIR"], os.environ["WANDB_CACHE_DIR"]]
pathlib.Path(os.environ["CALLS"]).write_text("\\n".join(notes))
exec(os.environ["THEN"])
"""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`python -m wandb` of child processes is a script that notes its arguments; returns the file of notes."""
    (tmp_path / "fake" / "wandb").mkdir(parents=True)
    (tmp_path / "fake" / "wandb" / "__init__.py").touch()
    (tmp_path / "fake" / "wandb" / "__main__.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_upload_calls_wandb_sync(tmp_path: Path, fake_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = offline_run(tmp_path / "a", "20260101_000000", "lr0.003")
    (segment,) = find_segments([folder])
    monkeypatch.setenv("THEN", "pathlib.Path(words[1] + '.synced').touch()")
    upload(segment, project="p", entity="e")
    *words, wandb_dir, cache = fake_wandb.read_text().splitlines()
    assert words == ["sync", str(folder / "run-lr0.003.wandb"), "--project", "p", "--entity", "e"]
    assert wandb_dir == cache
    assert not Path(wandb_dir).exists()  # wandb's own logs of the upload
    assert segment.uploaded
    upload(segment)
    assert fake_wandb.read_text().splitlines()[:2] == ["sync", str(folder / "run-lr0.003.wandb")]
    assert "--project" not in fake_wandb.read_text()


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        # `wandb sync` ends with 0 when the server refuses.
        (
            "print('wandb: Syncing 1 run(s):'); print('wandb: ERROR invalid API key', file=sys.stderr)",
            "invalid API key",
        ),
        ("print('wandb: ERROR Find detailed error logs at: x'); print('Error: No API key'); sys.exit(1)", "No API key"),
        ("print('wandb: Not authenticated.')", "Not authenticated"),
        ("pathlib.Path(words[1] + '.synced').touch(); sys.exit(1)", "gives no reason"),
    ],
)
def test_an_upload_without_a_mark_has_failed(
    tmp_path: Path, fake_wandb: Path, monkeypatch: pytest.MonkeyPatch, then: str, reason: str
) -> None:
    (segment,) = find_segments([offline_run(tmp_path / "a", "20260101_000000", "a")])
    monkeypatch.setenv("THEN", then)
    with pytest.raises(UploadError, match=reason):
        upload(segment)


def test_an_upload_that_hangs_is_given_up(tmp_path: Path, fake_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (segment,) = find_segments([offline_run(tmp_path / "a", "20260101_000000", "a")])
    monkeypatch.setenv("THEN", "import time; time.sleep(30)")
    monkeypatch.setattr(wandb_sync, "_UPLOAD_TIMEOUT_S", 0.5)
    with pytest.raises(UploadError, match="did not end within"):
        upload(segment)
