import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stability_lab.compare.run_record import find_runs
from stability_lab.config import ConfigError
from stability_lab.logs.training_log import read_logs
from stability_lab.tracking.run_files import read_rows
from stability_lab.tracking.wandb import api as wandb_api
from stability_lab.tracking.wandb import login as wandb_login
from stability_lab.tracking.wandb.api import fetch, parse

URL = "wandb://team/lab/sweep"


class FakeFile:
    def __init__(self, name: str, content: bytes, size: int | None = None) -> None:
        self.name, self.content, self.size = name, content, len(content) if size is None else size
        self.downloads = 0

    def download(self, root: str, replace: bool) -> Any:
        assert replace
        self.downloads += 1
        path = Path(root) / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content)
        return path.open()


class FakeRun:
    """What `wandb.Api` gives for a run, as far as it is asked for."""

    def __init__(self, run_id: str, state: str = "finished", **fields: Any) -> None:
        self.id, self.name, self.state, self.group, self.job_type = run_id, f"name of {run_id}", state, "sweep", "train"
        self.heartbeat_at, self.created_at, self.history_line_count = "2026-01-01T00:00:00", "2026-01-01T00:00:00", 2
        self.tags: list[str] = []
        self.path = ["team", "lab", run_id]
        self.config: dict[str, Any] = {"stabilizer": {"qknorm": {}}, "optimizer": {"lr": 0.1}, "seed": 1, "lr": 0.1}
        self.summary_metrics: dict[str, Any] = {"status": "completed", "verdict": "stable", "final.val/loss": 3.5}
        self.history: list[dict[str, Any]] = [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": "NaN"}]
        self.uploaded: list[FakeFile] = []
        self.scans = 0
        self.__dict__.update(fields)

    def files(self, names: list[str]) -> Iterator[FakeFile]:
        assert names
        return iter(self.uploaded)

    def scan_history(self) -> Iterator[dict[str, Any]]:
        self.scans += 1
        return iter(self.history)


class FakeApi:
    """Pages of two runs, as the real one has pages of fifty."""

    def __init__(self, *runs: FakeRun, error: Exception | None = None) -> None:
        self.all, self.error, self.asked = runs, error, {}

    def runs(self, path: str, **options: Any) -> Iterator[FakeRun]:
        self.asked = {"path": path, **options}
        for start in range(0, len(self.all), 2):
            if self.error and start:
                raise self.error
            yield from self.all[start : start + 2]
        if self.error:
            raise self.error


OWN = {
    "config.yaml": b"# as uploaded\nseed: 1\noptimizer: {lr: 0.1}\n",
    "manifest.json": b'{"stabilizers": ["qknorm"], "fingerprint": "0a1b2c3d"}',
    "summary.json": b'{"status": "completed", "verdict": "stable", "final": {"val/loss": 3.25}}',
    "metrics.jsonl": b'{"step": 1, "train/loss": 2.5}\n{"step": 2, "train/loss": NaN}\n',
}


def own_files(**changes: bytes) -> list[FakeFile]:
    return [FakeFile(f"stability_lab/{name}", content) for name, content in {**OWN, **changes}.items()]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_uploaded_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    run = FakeRun("qknorm_lr0.1-0a1b2c", uploaded=own_files())
    (folder,) = fetch(URL, tmp_path, FakeApi(run))
    assert folder == tmp_path / "team" / "lab" / "qknorm_lr0.1-0a1b2c"
    for name, content in OWN.items():
        assert (folder / name).read_bytes() == content
    assert sorted(path.name for path in folder.iterdir()) == sorted([*OWN, "events.jsonl", "wandb.json"])
    assert run.scans == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_all_pages_in_order_without_comparisons(tmp_path: Path) -> None:
    runs = [FakeRun(name) for name in "edcba"]
    api = FakeApi(*runs, FakeRun("figures", job_type="compare"))
    assert [path.name for path in fetch(URL, tmp_path, api)] == list("edcba")
    assert api.asked["path"] == "team/lab"
    assert api.asked["filters"] == {"group": "sweep"}
    assert api.asked["order"] == "+created_at"
    fetch("wandb://team/lab", tmp_path, api)
    assert api.asked["filters"] == {}


def test_what_was_not_uploaded_is_rebuilt(tmp_path: Path) -> None:
    files = [file for file in own_files() if file.name.endswith(("config.yaml", "metrics.jsonl"))]
    (folder,) = fetch(URL, tmp_path, FakeApi(FakeRun("a", uploaded=files)))
    assert (folder / "config.yaml").read_bytes() == OWN["config.yaml"]
    manifest = read(folder / "manifest.json")
    assert manifest["stabilizers"] == ["qknorm"]
    assert (manifest["run"], manifest["group"], manifest["tracker_id"]) == ("name of a", "sweep", "a")
    made = ["summary.json", "events.jsonl", "manifest.json"]
    assert manifest["rebuilt_from_wandb"] == {"path": "team/lab/a", "files": made}
    assert read(folder / "summary.json") == {"status": "completed", "verdict": "stable", "final": {"val/loss": 3.5}}


def test_a_run_without_any_file_can_be_read_and_compared(tmp_path: Path) -> None:
    fetch(URL, tmp_path, FakeApi(FakeRun("a")))
    ((record,), _) = find_runs([tmp_path])
    assert (record.stabilizers, record.lr, record.config["seed"]) == ("qknorm", 0.1, 1)
    assert "lr" not in record.config
    first, second = read_rows(record.path / "metrics.jsonl")
    assert first == {"step": 1, "train/loss": 2.5}
    assert math.isnan(second["train/loss"])


def test_a_run_of_other_code_is_judged_like_a_log(tmp_path: Path) -> None:
    history = [{"_step": n, "trainer/global_step": n * 10, "train_loss": 3.0, "grad_norm": 1.0} for n in range(5)]
    config = {"learning_rate": 0.3, "seed": 7, "weird": {1: object}, "_wandb": {}}
    run = FakeRun("x1", state="crashed", config=config, summary_metrics={"train_loss": 3.0}, history=history)
    (folder,) = fetch(URL, tmp_path, FakeApi(run))
    ((record,), _) = find_runs([folder])
    assert (record.stabilizers, record.lr, record.config["seed"]) == ("none", 0.3, 7)
    assert record.summary["status"] == "interrupted"
    log = read_logs(folder)[0]
    assert log.columns == {"loss": "train/loss", "grad_norm": "optim/grad_norm", "step": "step"}
    assert log.log.step.tolist() == [0, 10, 20, 30, 40]


def test_finished_runs_are_downloaded_once(tmp_path: Path) -> None:
    run = FakeRun("a", uploaded=own_files())
    (folder,) = fetch(URL, tmp_path, FakeApi(run))
    (folder / "mark").touch()
    assert fetch(URL, tmp_path, FakeApi(run)) == [folder]
    assert (folder / "mark").exists()
    assert [file.downloads for file in run.uploaded] == [1] * 4

    run.heartbeat_at = "2026-01-02T00:00:00"
    fetch(URL, tmp_path, FakeApi(run))
    assert [file.downloads for file in run.uploaded] == [2] * 4
    assert not (folder / "mark").exists()


def test_a_running_run_is_read_anew_and_from_its_history(tmp_path: Path) -> None:
    # The uploaded files are those of the part before it was resumed.
    run = FakeRun("a", state="running", uploaded=own_files())
    for rows in (2, 3):
        (folder,) = fetch(URL, tmp_path, FakeApi(run))
        assert len(read_rows(folder / "metrics.jsonl")) == rows
        assert read(folder / "summary.json")["status"] == "running"
        run.history.append({"step": 3, "train/loss": 1.0})
    assert run.uploaded[0].downloads == 0


def test_an_endless_history_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_api, "_MOST_ROWS", 1)
    (folder,) = fetch(URL, tmp_path, FakeApi(FakeRun("a")))
    assert read_rows(folder / "metrics.jsonl") == [{"step": 1, "train/loss": 2.5}]


def test_an_uploaded_config_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = own_files(**{"config.yaml": b"!!python/object/apply:os.system ['touch pwned']"})
    (folder,) = fetch(URL, tmp_path / "cache", FakeApi(FakeRun("a", uploaded=files)))
    with pytest.raises(ConfigError, match="its files cannot be read"):
        find_runs([folder])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_hostile_names_stay_inside(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "cache"
    evil = [
        FakeFile(name, b"evil")
        for name in ("stability_lab/../../../x", "../x", "/tmp/x", "stability_lab/run.sh", "config.yaml", "")
    ]
    runs = [FakeRun(name, uploaded=evil) for name in ("../../x", "..", "a/b", "a-b", ".hidden", "é\n", "x" * 500)]
    folders = fetch("wandb://..%2F../..%2Fetc/g", inside, FakeApi(*runs))
    assert len(set(folders)) == len(runs)
    for folder in folders:
        assert folder.resolve().is_relative_to(inside.resolve())
        assert folder.parent == folders[0].parent
        assert folder.name.isascii()
        assert not folder.name.startswith(".")
        assert (folder / "config.yaml").read_bytes() != b"evil"
    assert all(file.downloads == 0 for file in evil)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cache"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "team" / "lab" / "a"
    mine.mkdir(parents=True)
    (mine / "config.yaml").write_text("mine: true")
    with pytest.raises(ConfigError, match="was not made from W&B, so it is left alone"):
        fetch(URL, tmp_path, FakeApi(FakeRun("a")))
    assert [path.name for path in mine.iterdir()] == ["config.yaml"]
    assert [path.name for path in mine.parent.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "error", [ValueError("Could not find project lab\nmore"), ConnectionError("reset"), KeyError("x"), RuntimeError()]
)
def test_what_w_and_b_says_is_one_sentence(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(URL, tmp_path, FakeApi(FakeRun("a"), FakeRun("b"), FakeRun("c"), error=error))
    assert str(caught.value).startswith("wandb://team/lab/sweep cannot be read: ")
    assert len(str(caught.value).splitlines()) == 1


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wandb://team/lab/sweep has no run"):
        fetch(URL, tmp_path, FakeApi())
    assert list(tmp_path.iterdir()) == []


def test_addresses() -> None:
    assert parse("wandb://team/lab") == ("team", "lab", None)
    assert parse("wandb://team/lab/") == ("team", "lab", None)
    assert parse("wandb://team/my%20lab/sweep%2F1") == ("team", "my lab", "sweep/1")


@pytest.mark.parametrize(
    "url",
    ["wandb://", "wandb://team", "wandb://team//g", "wandb:///lab", "wandb://a/b/c/d", "https://wandb.ai/a/b", "a/b"],
)
def test_addresses_that_are_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no W&B address: it must be wandb://ENTITY/PROJECT"):
        fetch(url, tmp_path, FakeApi(FakeRun("a")))


def test_without_a_login_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_api, "problem", lambda: "no W&B key is configured (wandb login, or WANDB_API_KEY)")
    with pytest.raises(ConfigError, match="wandb://team/lab/sweep cannot be read: no W&B key is configured"):
        fetch(URL, tmp_path)


FETCH = """
import pathlib, sys
from stability_lab.config import ConfigError
from stability_lab.tracking.wandb.api import fetch
try:
    fetch("wandb://team/lab", pathlib.Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_dead_network_is_noticed_in_seconds(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": "0a" * 20}
        kept |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", FETCH, str(tmp_path / "cache")],
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert time.monotonic() - began < 20
    assert done.stdout.startswith("wandb://team/lab cannot be read: the W&B server cannot be reached")
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
    assert not (tmp_path / "cache").exists()


def test_the_real_api_offers_what_is_used() -> None:
    """The names that the fakes stand for, so that a release of wandb without them is noticed."""
    import inspect

    import wandb
    from wandb.apis.public import Api, File, Run

    assert {"path", "filters", "order", "per_page", "lazy"} <= inspect.signature(Api.runs).parameters.keys()
    assert "timeout" in inspect.signature(wandb.Api).parameters
    assert "names" in inspect.signature(Run.files).parameters
    assert {"root", "replace"} <= inspect.signature(File.download).parameters.keys()
    for name in ("id", "name", "state", "config", "summary_metrics", "scan_history", "path"):
        assert hasattr(Run, name), name
    assert wandb_login.problem is wandb_api.problem
    from wandb.apis.public.runs import LIGHTWEIGHT_RUN_FRAGMENT

    for field in ("heartbeatAt", "historyLineCount", "createdAt", "jobType", "group", "tags"):
        assert field in LIGHTWEIGHT_RUN_FRAGMENT
