"""The command `sync`: what it says and how it ends. What `wandb sync` is asked for: tracking/test_wandb_sync.py."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stability_lab import cli
from stability_lab.commands import sync
from stability_lab.tracking.tracker import RunInfo
from stability_lab.tracking.wandb import login as wandb_login
from stability_lab.tracking.wandb.offline import Segment, UploadError
from stability_lab.tracking.wandb.wandb_tracker import WandbTracking


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for name, started in (("b", "20260102_000000"), ("a", "20260101_000000"), ("a", "20260103_000000")):
        folder = tmp_path / "sweep" / name / "wandb" / f"offline-run-{started}-{name}"
        folder.mkdir(parents=True)
        (folder / f"run-{name}.wandb").touch()
    return tmp_path / "sweep"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A W&B that takes everything; the order in which it got it."""
    taken: list[str] = []

    def take(segment: Segment, project: str | None, entity: str | None) -> None:
        taken.append(segment.path.name)
        segment.log.with_suffix(".wandb.synced").touch()

    monkeypatch.setattr(wandb_login, "problem", lambda: None)
    monkeypatch.setattr(sync, "upload", take)
    return taken


ORDER = ["offline-run-20260101_000000-a", "offline-run-20260102_000000-b", "offline-run-20260103_000000-a"]


def test_everything_once_and_in_order(sweep: Path, server: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sync", str(sweep)]) == 0
    assert server == ORDER
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "3 uploaded, 0 uploaded before, 0 held back",
        f"next: python -m stability_lab compare {sweep} --wandb",
    ]
    assert cli.run(["sync", str(sweep)]) == 0
    assert server == ORDER
    assert capsys.readouterr().out.startswith("0 uploaded, 3 uploaded before, 0 held back\n")


def test_an_error_stops_and_the_same_command_goes_on(
    sweep: Path, server: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = sync.upload

    def breaks(segment: Segment, project: str | None, entity: str | None) -> None:
        if segment.run_id == "b":
            raise UploadError("connection lost")
        works(segment, project, entity)

    monkeypatch.setattr(sync, "upload", breaks)
    assert cli.run(["sync", str(sweep)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: 1 of 3 uploaded, then offline-run-20260102_000000-b failed: connection lost;")
    assert len(error.splitlines()) == 1
    monkeypatch.setattr(sync, "upload", works)
    assert cli.run(["sync", str(sweep)]) == 0
    assert server == ORDER


def test_dry_run_lists_the_order_and_needs_no_login(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_login, "problem", lambda: pytest.fail("asked for a login"))
    monkeypatch.chdir(sweep)
    assert cli.run(["sync", "--dry-run", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    paths = [f"{name[-1]}/wandb/{name}" for name in ORDER]
    assert lines[:3] == [f"{number}  {path}" for number, path in enumerate(paths, start=1)]
    assert lines[3] == "3 to upload, 0 uploaded before, 0 held back"
    assert not list(sweep.rglob("*.synced"))


def test_what_is_held_back_is_named(sweep: Path, server: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "a" / "wandb" / ORDER[2] / "run-a.wandb.synced").touch()
    assert cli.run(["sync", str(sweep)]) == 1
    assert server == ORDER[1:2]
    out = capsys.readouterr().out
    assert f"{ORDER[0]}: a later part of this run is in W&B already" in out
    assert out.splitlines()[-1] == "1 uploaded, 1 uploaded before, 1 held back"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], "no offline W&B run here"),
        ([".", "--project", ""], "--project is empty"),
        ([], "the following arguments are required: PATH"),
        ([".", "--append"], "unrecognized arguments: --append"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["sync", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


class Refuse(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(401)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b'{"errors": [{"message": "invalid API key"}]}')

    do_HEAD = do_GET = do_PUT = do_POST

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A real offline run."""
    folder = tmp_path / "outputs" / "run"
    folder.mkdir(parents=True)
    tracker = WandbTracking(mode="offline").start(RunInfo("run", "runs", (), {"seed": 1}, folder))
    tracker.log([{"step": 1, "tokens": 16, "train/loss": 2.5}])
    tracker.finish({"verdict": "stable"}, 0)
    return tmp_path / "outputs"


def sync_apart(outputs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process whose home and working directory are empty."""
    home = outputs.parent / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    kept |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "stability_lab", "sync", str(outputs)]
    done = subprocess.run(
        command,
        cwd=home,
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # wandb's service keeps its own log in the cache of the user.
    assert [path.name for path in home.iterdir()] in ([], [".cache"])
    return done


@pytest.fixture
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_server_that_refuses_leaves_the_run_unmarked(recorded: Path, refusing: str) -> None:
    done = sync_apart(recorded, WANDB_BASE_URL=refusing, WANDB_API_KEY="0123456789abcdef" * 2 + "01234567")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 0 of 1 uploaded, then offline-run-")
    assert "failed: invalid API key; the same command goes on from there" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(recorded.rglob("*.synced"))


def test_without_a_key_one_sentence(recorded: Path) -> None:
    done = sync_apart(recorded)
    assert done.returncode == 1
    assert done.stderr == "error: nothing was uploaded: no W&B key is configured (wandb login, or WANDB_API_KEY)\n"


@pytest.mark.slow
def test_without_a_network_one_sentence(recorded: Path) -> None:
    # A server that accepts and never answers is the slowest of the broken networks.
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = sync_apart(recorded, WANDB_BASE_URL=url, WANDB_API_KEY="0123456789abcdef" * 2 + "01234567")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing was uploaded: the W&B server cannot be reached")
    assert len(done.stderr.splitlines()) == 1
