import builtins
import http.server
import json
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stability_lab.tracking.tracker import Mirror, NullTracker, RunInfo
from stability_lab.tracking.wandb import wandb_tracker as tracking_wandb
from stability_lab.tracking.wandb.wandb_tracker import FILES, FOLDER, WandbTracking, grouping_keys, run_id_from

FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"

RUN = """
import logging, os, pathlib, sys, time
logging.basicConfig(format="LOG %(message)s")
print("PID", os.getpid())
from stability_lab.tracking.tracker import RunInfo
from stability_lab.tracking.wandb.wandb_tracker import WandbTracking
began = time.monotonic()
for n, folder in enumerate(sys.argv[2:]):
    config = {"seed": n, "api_key": "k" * 40, "stabilizer": {"zloss": {}, "qknorm": {}}, "optimizer": {"lr": 0.03}}
    pathlib.Path(folder, "summary.json").write_text('{"status": "diverged"}')
    name, tags = f"qknorm lr=3e-2/{n}", ("qknorm", "zloss")
    info = RunInfo(name, "sweep-1", tags, config, pathlib.Path(folder))
    tracker = WandbTracking(**eval(sys.argv[1])).start(info)
    print("STARTED", round(time.monotonic() - began, 1), tracker.id)
    rows = [{"step": 1, "tokens": 16, "train/loss": 2.5}]
    rows.append({"step": 2, "tokens": 32, "train/loss": float("nan")})
    tracker.log(rows)
    tracker.event({"event": "spike", "step": 2, "signal": "train/loss", "value": 9.5})
    tracker.finish({"verdict": "diverged", "loss": float("nan"), "score": None, "final.val/loss": 4.5}, 3 * n)
    print("HINT", tracker.hint)
"""


@pytest.fixture
def environment(tmp_path):
    """A home without any W&B state and no W&B variable, so that a developer's own key cannot take part."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") and key != "NETRC"}
    return {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }


def start_runs(environment, options, *folders, stdin=subprocess.DEVNULL, cwd=None):
    command = [sys.executable, "-c", RUN, repr(options), *map(str, folders)]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        command, env=environment, stdin=stdin, capture_output=True, text=True, timeout=60, check=True, cwd=cwd
    )


def started_after_s(shown):
    return float(next(line for line in shown.stdout.splitlines() if line.startswith("STARTED")).split()[1])


def inspect(folder, *options):
    """What wandb's own reader finds in an offline run."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def service_of(pid):
    """Command lines of the processes that wandb started for the process `pid` and that still run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "wandb-core" in words[0] and pid in words:
            found.append(words)
    return found


@pytest.mark.slow
def test_two_offline_runs_of_one_process_read_back(tmp_path, environment):
    folders = [tmp_path / "out" / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    shown = start_runs(environment, {"mode": "offline"}, *folders, cwd=cwd)

    assert shown.stderr == ""
    assert len(shown.stdout.splitlines()) == 5  # our own lines only
    hints = [line.removeprefix("HINT ") for line in shown.stdout.splitlines() if line.startswith("HINT")]
    ids = set()
    for n, (folder, hint) in enumerate(zip(folders, hints, strict=True)):
        (run,) = (folder / "wandb").glob("offline-run-*")
        assert hint == f"wandb sync {run}"
        state = json.loads(inspect(run, "--summary"))
        ids.add(state["run_id"])
        assert state["run_id"].startswith(f"qknorm-lr-3e-2-{n}-")
        assert state["name"] == f"qknorm lr=3e-2/{n}"
        assert (state["project"], state["tags"]) == ("stability_lab", ["qknorm", "zloss", "verdict:diverged"])
        assert state["config"]["seed"] == n
        assert (state["config"]["stabilizers"], state["config"]["lr"]) == ("qknorm+zloss", 0.03)
        assert state["exit_code"] == 3 * n
        assert state["summary"]["verdict"] == "diverged"
        assert state["summary"]["loss"] == "NaN"
        assert state["summary"]["val/loss"] == 4.5
        assert "train/loss" not in state["summary"]  # no summary of W&B's own making

        text = inspect(run)
        assert "k" * 40 not in text
        records = [json.loads(line) for line in text.splitlines()]
        history = [record["history"]["item"] for record in records if record["type"] == "history"]
        assert [(row["step"], row["tokens"]) for row in history if "tokens" in row] == [(1, 16), (2, 32)]
        assert [row["train/loss"] for row in history if "train/loss" in row] == [2.5, "NaN"]
        (spike,) = [row for row in history if "event/spike" in row]
        assert (spike["step"], spike["event/spike"], spike["event/spike/value"]) == (2, 1, 9.5)
        kept = [record["files"]["files"] for record in records if record["type"] == "files"]
        assert kept == [[{"path": "stability_lab/summary.json", "policy": "END"}]]
        assert json.loads((run / "files" / "stability_lab" / "summary.json").read_text()) == {"status": "diverged"}
        metrics = [record["metric"] for record in records if record["type"] == "metric"]
        assert any(m.get("glob_name") == "*" and m["step_metric"] == "step" for m in metrics)
        assert any(record["run"].get("run_group") == "sweep-1" for record in records if record["type"] == "run")
    assert len(ids) == 2
    assert list(cwd.iterdir()) == []
    assert list((tmp_path / "home").iterdir()) == []
    pid = shown.stdout.splitlines()[0].removeprefix("PID ")
    assert service_of(pid) == []


@pytest.mark.slow
def test_resumed_run_keeps_its_id_and_syncs_in_order(tmp_path, environment):
    # The first run of the process is another one; the other two are two parts of the run "kept-1".
    script = RUN.replace("pathlib.Path(folder))", "pathlib.Path(folder), resume_id='kept-1' if n else None)")
    script = script.replace("    tracker = ", "    time.sleep(1.1)  # folders are named by the second\n    tracker = ")
    assert script.count("kept-1") == script.count("sleep") == 1
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-c", script, "{'mode': 'offline'}", *[str(folder)] * 3]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    words = shown.stdout.splitlines()[-1].split()
    assert words[:3] == ["HINT", "wandb", "sync"]
    assert len(words) == 5
    assert all(word.endswith("-kept-1") for word in words[3:])
    assert words[3:] == sorted(words[3:])
    # What makes `wandb sync` append to a run instead of replacing it.
    for part in words[3:]:
        first = next(json.loads(line) for line in inspect(part).splitlines() if json.loads(line)["type"] == "run")
        assert first["run"]["resume"] is True


FILL = """
import json, logging, pathlib, sys, time
logging.basicConfig(format="LOG %(message)s")
from stability_lab.tracking.tracker import RunInfo
from stability_lab.tracking.wandb.wandb_tracker import WandbTracking
folder, had = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
info = RunInfo("a", "g", (), {}, folder)
first = WandbTracking(mode="offline").start(info)
first.log([{"step": step, "tokens": 16 * step} for step in had])
first.event({"event": "spike", "step": 4})
first.finish({}, 1)
time.sleep(1.1)  # folders are named by the second
rows = [{"step": step, "tokens": 16 * step, "train/loss": float("nan")} for step in range(1, 6)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
if sys.argv[3]:
    next(folder.glob("wandb/*/*.wandb")).write_bytes(b"damaged")
second = WandbTracking(mode="offline").start(RunInfo("a", "g", (), {}, folder, resume_id=first.id))
second.log([{"step": 6, "tokens": 96}])
second.finish({}, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("had", "damaged", "expected"),
    [([1, 2, 3], "", [4, 5, 6]), ([1, 3, 5], "", [2, 4, 6]), ([1, 2, 3, 4, 5, 6], "", [6]), ([1], "damaged", [6])],
)
def test_rows_that_a_kill_took_are_filled_from_the_file(tmp_path, environment, had, damaged, expected):
    """An event of a step is no row of it."""
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", FILL, str(tmp_path), json.dumps(had), damaged]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    parts = sorted(tmp_path.glob("wandb/offline-run-*"))
    records = [json.loads(line) for line in inspect(parts[-1]).splitlines()]
    assert [r["history"]["item"]["step"] for r in records if r["type"] == "history"] == expected
    assert shown.stderr.count("LOG W&B may lack rows of before the resume") == bool(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "online"])
def test_no_key_on_a_terminal_never_asks(tmp_path, environment, mode):
    ours, theirs = pty.openpty()
    try:
        shown = start_runs(environment, {"mode": mode}, tmp_path, stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert started_after_s(shown) < 10
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == (mode == "online")
    assert shown.stderr.count("LOG") == (1 if mode == "online" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["environment", "netrc"])
def test_key_without_network_goes_offline(tmp_path, environment, source):
    # A server that accepts and never answers is the slowest of the broken networks.
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment["WANDB_BASE_URL"] = url
        if source == "environment":
            environment["WANDB_API_KEY"] = FAKE_KEY
        else:
            netrc = Path(environment["HOME"]) / ".netrc"
            netrc.write_text(f"machine {url.removeprefix('http://')}\n  login user\n  password {FAKE_KEY}\n")
        shown = start_runs(environment, {"init_timeout_s": 2.0}, tmp_path)
    assert started_after_s(shown) < 10
    assert len([line for line in shown.stderr.splitlines() if line.startswith("LOG")]) == 1
    assert "recorded offline" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    (run,) = (tmp_path / "wandb").glob("*run-*-*")
    assert run.name.startswith("offline-run-")
    assert FAKE_KEY not in shown.stdout + shown.stderr + inspect(run)


@pytest.mark.slow
def test_fake_key_with_the_default_timeout_stays_below_ten_seconds(tmp_path, environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment["WANDB_API_KEY"] = FAKE_KEY
        shown = start_runs(environment, {}, tmp_path)
    assert started_after_s(shown) < 10


class Refuse(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(401)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b'{"errors": [{"message": "invalid API key"}]}')

    do_HEAD = do_GET = do_POST

    def log_message(self, format, *args):
        del format, args


@pytest.mark.slow
def test_refused_key_goes_offline(tmp_path, environment):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
        environment["WANDB_API_KEY"] = FAKE_KEY
        began = time.monotonic()
        try:
            shown = start_runs(environment, {}, tmp_path)
        finally:
            server.shutdown()
            thread.join()
    assert time.monotonic() - began < 20
    assert started_after_s(shown) < 10
    assert len(shown.stderr.splitlines()) == 1
    assert "did not take the run" in shown.stderr
    hint = next(line for line in shown.stdout.splitlines() if line.startswith("HINT"))
    (run,) = (tmp_path / "wandb").glob("*run-*-*")
    assert hint == f"HINT wandb sync {run}"


@pytest.mark.slow
def test_unknown_host_goes_offline_at_once(tmp_path, environment):
    environment["WANDB_BASE_URL"] = "https://wandb.invalid"
    environment["WANDB_API_KEY"] = FAKE_KEY
    shown = start_runs(environment, {}, tmp_path)
    assert started_after_s(shown) < 10
    assert len(shown.stderr.splitlines()) == 1
    assert "cannot be reached" in shown.stderr


@pytest.mark.slow
def test_malformed_key_goes_offline(tmp_path, environment):
    environment["WANDB_API_KEY"] = "short"
    shown = start_runs(environment, {}, tmp_path)
    assert len(shown.stderr.splitlines()) == 1
    assert "key cannot be used" in shown.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def ours(caplog):
    return [record for record in caplog.records if record.name == "stability_lab"]


@pytest.fixture
def info(tmp_path):
    return RunInfo("name", None, (), {}, tmp_path)


def test_wandb_mode_counts_only_in_auto(info, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert isinstance(WandbTracking().start(info), NullTracker)
    tracker = WandbTracking(mode="offline").start(info)
    assert len(service_of(str(os.getpid()))) == 1
    tracker.finish({}, 0)
    assert tracker.id is not None
    assert tracker.hint.startswith("wandb sync ")


def test_mode_disabled_creates_nothing(info):
    assert isinstance(WandbTracking(mode="disabled").start(info), NullTracker)
    assert list(info.dir.iterdir()) == []


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'wandb'"), RuntimeError("broken build")])
def test_missing_or_broken_wandb_is_one_warning(info, monkeypatch, caplog, error):
    real = builtins.__import__

    def without_wandb(name, *arguments, **options):
        if name == "wandb":
            raise error
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        tracker = WandbTracking(mode="offline").start(info)
    assert isinstance(tracker, NullTracker)
    assert len(ours(caplog)) == 1
    assert "tracking=local" in caplog.text
    assert str(error) in caplog.text


def test_a_run_that_breaks_half_way_is_dropped(info, caplog):
    tracker = WandbTracking(mode="offline").start(info)
    mirror = Mirror(tracker)
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        tracker.finish({}, 0)
        mirror.log([{"step": 1}])  # a finished run takes no more rows
        mirror.finish({}, 0)
    assert len(ours(caplog)) == 1


def test_the_small_files_of_a_run_are_kept_byte_for_byte(info, monkeypatch):
    contents = {name: f"# ours: {name}\n".encode() for name in FILES}
    for name, content in contents.items():
        (info.dir / name).write_bytes(content)
    (info.dir / "metrics.jsonl").write_bytes(b"x" * 1000)
    monkeypatch.setattr(tracking_wandb, "_MOST_BYTES", 999)
    WandbTracking(mode="offline").start(info).finish({}, 0)
    (run,) = (info.dir / "wandb").glob("offline-run-*")
    kept = {path.name: path.read_bytes() for path in (run / "files" / FOLDER).iterdir()}
    assert kept == {name: content for name, content in contents.items() if name != "metrics.jsonl"}
    assert not any(path.is_symlink() for path in (run / "files" / FOLDER).iterdir())


def test_files_that_do_not_fit_cost_one_warning_and_nothing_else(info, monkeypatch, caplog):
    def full_disk(source, copy):
        raise OSError(28, "No space left on device")

    (info.dir / "summary.json").write_text("{}")
    monkeypatch.setattr(tracking_wandb.shutil, "copyfile", full_disk)
    tracker = WandbTracking(mode="offline").start(info)
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        tracker.finish({"verdict": "stable"}, 0)
    assert len(ours(caplog)) == 1
    assert "No space left on device" in caplog.text
    (run,) = (info.dir / "wandb").glob("offline-run-*")
    assert json.loads(inspect(run, "--summary"))["summary"]["verdict"] == "stable"


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"stabilizer": {}, "model": {"name": "gpt_nano"}}, {"stabilizers": "none", "model_name": "gpt_nano"}),
        (
            {"stabilizer": {"zloss": {}, "qknorm": {}}, "optimizer": {"lr": 0.1}},
            {"stabilizers": "qknorm+zloss", "lr": 0.1},
        ),
        ({"stabilizer": "x", "optimizer": "adamw"}, {}),
    ],
)
def test_keys_by_which_people_group(config, keys):
    assert grouping_keys(config) == keys


def test_logging_a_row_costs_far_less_than_a_step(info):
    tracker = WandbTracking(mode="offline").start(info)
    rows = [{"step": i, "tokens": i, **{f"m{k}": 1.0 for k in range(20)}} for i in range(200)]
    began = time.process_time()
    tracker.log(rows)
    spent = time.process_time() - began
    tracker.finish({}, 0)
    assert spent / len(rows) < 5e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "onlin"}, "^mode is 'onlin'.*auto, online, offline, disabled"),
        ({"init_timeout_s": 0.0}, "^init_timeout_s is 0.0"),
        ({"init_timeout_s": float("nan")}, "^init_timeout_s is nan"),
        ({"project": ""}, "^project is empty"),
        ({"project": "team/mine"}, r"^project is 'team/mine', but a W&B project has none of / "),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        WandbTracking(**options)


@pytest.mark.parametrize("name", ["qknorm lr=3e-2, seed=1", "../x", "", "é", "a" * 300])
def test_ids_are_readable_and_unique(name):
    first, second = run_id_from(name), run_id_from(name)
    assert first != second
    assert set(first) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    assert 7 < len(first) < 128
    assert not first.startswith((".", "-"))
