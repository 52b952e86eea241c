"""Variables of W&B are honoured where W&B can use them; else they cost one warning and never the run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stability_lab.tracking.wandb.environment import asked_mode, drop_unusable, is_set_up, project_of, unusable

START = """
import logging, pathlib, sys
logging.basicConfig(format="LOG %(message)s")
from stability_lab.tracking.tracker import RunInfo
from stability_lab.tracking.wandb.wandb_tracker import WandbTracking
for name in sys.argv[1:]:
    folder = pathlib.Path(name)
    folder.mkdir()
    tracker = WandbTracking().start(RunInfo(folder.name, None, (), {}, folder))
    tracker.log([{"step": 1, "train/loss": 2.5}])
    tracker.finish({}, 0)
    print("ID", tracker.id)
"""


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "auto"),
        ({"WANDB_MODE": ""}, "auto"),
        ({"WANDB_MODE": "Online"}, "online"),
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": "oflline"}, "offline"),  # nothing is sent, and nothing lost
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_DISABLED": "1", "WANDB_MODE": "online"}, "disabled"),
        ({"WANDB_DISABLED": "false", "WANDB_MODE": "online"}, "online"),
        ({"WANDB_DISABLED": "", "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_the_mode_that_is_asked_for(environ: dict[str, str], mode: str) -> None:
    assert asked_mode(environ) == mode


@pytest.mark.parametrize(
    ("value", "project"),
    [
        (None, "stability_lab"),
        ("", "stability_lab"),
        ("mine", "mine"),
        ("my runs.2", "my runs.2"),
        ("a/b", "stability_lab"),
    ],
)
def test_the_project_that_is_asked_for(value: str | None, project: str) -> None:
    assert project_of({} if value is None else {"WANDB_PROJECT": value}) == project


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("WANDB_MODE", "", "online, offline or disabled"),
        ("WANDB_MODE", "garbage", "online, offline or disabled"),
        ("WANDB_RESUME", "garbage", "resume=RUN"),
        ("WANDB_RESUME", "must", "resume=RUN"),
        ("WANDB_DISABLED", "maybe", "true or false"),
        ("WANDB_PROJECT", "a/b", "a name without"),
        ("WANDB_BASE_URL", "nonsense", "an address such as"),
        ("WANDB_BASE_URL", "", "an address such as"),
        ("WANDB_INIT_TIMEOUT", "soon", "takes no such value"),
        ("WANDB_TAGS", "", "takes no such value"),
        ("WANDB_RUN_ID", "a/b", "takes no such value"),
    ],
)
def test_a_value_that_is_of_no_use_is_dropped_with_one_sentence(
    name: str, value: str, right: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    assert right in unusable({name: value})[name]
    with caplog.at_level(logging.WARNING, logger="stability_lab"):
        drop_unusable()
        drop_unusable()
    assert os.environ.get(name) in (None, "offline")
    warned = [record.getMessage() for record in caplog.records if record.name == "stability_lab"]
    assert len(warned) == bool(value)  # an empty one is as good as none
    assert all(text.startswith(f"{name}={value} is ignored: ") and "\n" not in text for text in warned)


def test_what_w_and_b_can_use_stays() -> None:
    fine = {
        "WANDB_MODE": "offline",
        "WANDB_TAGS": "a,b",
        "WANDB_PROJECT": "mine",
        "WANDB_NOTES": "x",
        "WANDB_DIR": "/x",
    }
    assert unusable({**fine, "WANDB_DISABLED": "true", "WANDB_OF_SOMEBODY": "y", "PATH": ""}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        {"WANDB_RESUME": "garbage"},
        {"WANDB_MODE": "oflline"},
        {"WANDB_MODE": "", "WANDB_BASE_URL": "", "WANDB_CONSOLE": "xx"},
        {"WANDB_PROJECT": "a/b", "WANDB_INIT_TIMEOUT": "soon"},
    ],
    ids=str,
)
def test_runs_are_recorded_all_the_same(broken: dict[str, str], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    environment = {**kept, **broken, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", START, str(tmp_path / "a"), str(tmp_path / "b")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert shown.stdout.count("ID a-") == shown.stdout.count("ID b-") == 1
    warned = shown.stderr.splitlines()
    assert len(warned) == sum(bool(value) for value in broken.values())
    assert all(line.startswith("LOG WANDB_") and " is ignored: " in line for line in warned)
    assert len(list(tmp_path.glob("?/wandb/offline-run-*"))) == 2


@pytest.mark.parametrize(
    ("environ", "files", "used"),
    [
        ({}, {}, False),
        ({"WANDB_ERROR_REPORTING": "false", "WANDB_MODE": ""}, {}, False),
        ({"WANDB_API_KEY": "0" * 40}, {}, True),
        ({"WANDB_ENTITY": "us"}, {}, True),
        ({}, {".netrc": "machine api.wandb.ai login user password x"}, True),
        ({}, {".netrc": "machine example.org login user password x"}, False),
        ({}, {".config/wandb/settings": "[default]"}, True),
    ],
)
def test_nothing_is_recorded_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], files: dict[str, str], used: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert is_set_up({"HOME": str(tmp_path), **environ}) is used


def test_a_run_without_any_sign_of_wandb_does_not_load_it(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from stability_lab.tracking.tracker import RunInfo
from stability_lab.tracking.wandb.wandb_tracker import WandbTracking
tracker = WandbTracking().start(RunInfo("a", None, (), {}, Path(sys.argv[1])))
print(tracker.hint, "wandb" in sys.modules)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**kept, "HOME": str(tmp_path), "NETRC": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("not recorded: W&B is not set up here (wandb login; or tracking.mode=offline")
    assert done.stdout.endswith(" False\n")
    assert list(tmp_path.iterdir()) == []
