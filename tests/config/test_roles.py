"""Every key has a role, and all that asks for it answers as that role does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from stability_lab.command_line import read_command_line
from stability_lab.compare.comparison import compare
from stability_lab.compare.grouping import group
from stability_lab.compare.run_record import RunRecord
from stability_lab.compare.suggest import suggest
from stability_lab.compose import Composed, compose_jobs
from stability_lab.config import ROLES, ConfigError, may_change_on_resume, role_of
from stability_lab.run.cost import speed_key
from stability_lab.run.folder import run_name, sweep_name
from stability_lab.run.resume import prepare
from stability_lab.tracking.manifest import fingerprint
from stability_lab.tracking.run_files import read_rows

KEYS = sorted(ROLES.keys() - {"hydra"})


class Answers(NamedTuple):
    """Is it another run, does its name say so, may it change on resume, is it another arm, is it asked for again in a
    suggested command, may a step take another time?"""

    fingerprint: bool
    name: bool
    resume: bool
    arm: bool
    suggestion: bool
    speed: bool


ANSWERS = {
    "result": Answers(fingerprint=True, name=True, resume=False, arm=True, suggestion=True, speed=True),
    "seed": Answers(fingerprint=True, name=True, resume=False, arm=False, suggestion=False, speed=False),
    "machine": Answers(fingerprint=True, name=True, resume=True, arm=False, suggestion=True, speed=True),
    "place": Answers(fingerprint=False, name=False, resume=True, arm=False, suggestion=False, speed=False),
    "writing": Answers(fingerprint=False, name=False, resume=True, arm=False, suggestion=True, speed=False),
}
# Exceptions, each with its reason in `roles.py`. The first two lead names and commands themselves.
NAMED_OTHERWISE = {"stabilizer": False, "recipe": True, "stressor": True}
SUGGESTED_OTHERWISE = {"stabilizer": False, "optimizer.lr": False}
MAY_CHANGE_ALL_THE_SAME = {"trainer.max_steps"}
AS_FAST_ALL_THE_SAME = {"trainer.max_steps", "trainer.eval_every", "diagnostics.probe_every", "schedule.warmup_steps"}


@pytest.fixture(scope="module")
def composed(tiny_overrides: tuple[str, ...]) -> Composed:
    (job,) = compose_jobs(
        read_command_line([*tiny_overrides, "+recipe=gpt2_mistral", "+stabilizer=zloss", "+stressor=no_warmup"])
    )
    return job


def other(value: Any) -> Any:
    """A value of the same kind, where the kind matters: an open set that is empty, another float."""
    return {} if isinstance(value, Mapping) else value + 1 if isinstance(value, float) else "other"


def changed(plain: Mapping[str, Any], key: str) -> dict[str, Any]:
    top = copy.deepcopy(dict(plain))
    *path, last = key.split(".")
    node = top
    for name in path:
        node = node[name]
    node[last] = other(node[last])
    return top


def replaced(config: Any, key: str) -> Any:
    name, _, rest = key.partition(".")
    value = getattr(config, name)
    return dataclasses.replace(config, **{name: replaced(value, rest) if rest else other(value)})


@pytest.mark.parametrize("key", KEYS)
def test_a_key_answers_as_its_role_does(key: str, composed: Composed, tmp_path: Path) -> None:
    plain, answers = composed.plain, ANSWERS[ROLES[key]]
    changed_plain = changed(plain, key)
    assert (fingerprint(changed_plain, "0") != fingerprint(plain, "0")) == answers.fingerprint
    named = run_name(["zloss"], [(key, "other")], "0a1b2c3d") != run_name(["zloss"], [], "0a1b2c3d")
    assert named == NAMED_OTHERWISE.get(key, answers.name)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    keeps = contextlib.nullcontext() if answers.resume or key in MAY_CHANGE_ALL_THE_SAME else pytest.raises(ConfigError)
    with keeps:
        prepare(tmp_path, composed._replace(plain=changed_plain))
    grouping = group([RunRecord(tmp_path, plain), RunRecord(tmp_path, changed_plain)])
    assert (len(grouping.cells) == 2) == answers.arm
    faster = speed_key(replaced(composed.config, key)) != speed_key(composed.config)
    assert faster == (answers.speed and not (key in AS_FAST_ALL_THE_SAME or is_a_float_above_0(plain, key)))


def is_a_float_above_0(plain: Any, key: str) -> bool:
    for name in key.split("."):
        plain = plain[name]
    return isinstance(plain, float) and plain > 0


def test_a_suggested_command_repeats_what_the_role_says(composed: Composed, tmp_path: Path) -> None:
    overrides = [f"++{key}=other" for key in KEYS]
    summary = {"status": "completed", "final": {"val/loss": 2.0}}
    runs = [
        RunRecord(tmp_path, {**composed.plain, "stabilizer": {name: {}}}, {"overrides": overrides}, summary)
        for name in ("zloss", "qknorm")
    ]
    (command,) = (line for line in suggest(compare(runs)) if "train -m" in line)
    for key in KEYS:
        expected = SUGGESTED_OTHERWISE.get(key, ANSWERS[ROLES[key]].suggestion)
        assert (f"{key}=other" in command.split()) == expected, key


def test_open_sets_options_of_groups_and_keys_of_other_programs() -> None:
    assert role_of("data.path") == role_of("data") == role_of("stabilizer.zloss.weight") == "result"
    assert role_of("tracking.mode") == "writing"
    assert role_of("model") == role_of("trainer") == role_of("experiment") == "result"
    assert role_of("hydra/launcher") == role_of("hydra.launcher.n_jobs") == "place"
    # Of another version of the schema, or of a loop that `Monitor` has recorded.
    for key in ("trainer.log_much", "threads", "lr", "seeds", "", "trainer"):
        assert role_of(key) == "result"
    assert may_change_on_resume("data.path")
    assert not may_change_on_resume("tokenizer.path")


def test_a_sweep_is_named_after_what_it_computes() -> None:
    def named(*words: str) -> str:
        jobs = compose_jobs(read_command_line(["-m", *words]))
        return sweep_name(["seed"], [fingerprint(job.plain, "") for job in jobs])

    words = ["seed=0,1", "+recipe=olmo2"]
    name = named(*words)
    assert named(*words, "sweep.fail_fast=true", "tracking=local", "trainer.log_every=1") == name
    assert named(*words, "trainer.threads=1") != name
    assert named(*words[:1]) != name


@pytest.mark.slow
def test_what_is_written_and_where_changes_no_number(
    tmp_path: Path, tiny_overrides: tuple[str, ...], run_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys of these two roles at once, but those that only mean something beside others."""
    monkeypatch.chdir(tmp_path)
    words = ["tracking=wandb", "tracking.mode=disabled", "group=b", "run_name=b", "if_exists=error", "output_dir=other"]
    words += ["trainer.log_every=3", "trainer.save_weights=false", "trainer.checkpoint_every=2"]
    words += ["trainer.keep_checkpoints=1", "sweep.strict=true", "sweep.fail_fast=true", "sweep.workers=1"]
    said = {word.partition("=")[0] for word in words}
    assert said >= {key for key in KEYS if ROLES[key] in ("place", "writing")} - {"resume", "recipe", "stressor"}
    assert run_command("train", *tiny_overrides, "run_name=a").code == 0
    assert run_command("train", *tiny_overrides, *words).code == 0
    rows = [read_rows(Path(run, "metrics.jsonl")) for run in ("outputs/runs/a", "other/b/b")]
    measured = [[{k: v for k, v in row.items() if not k.startswith("perf/")} for row in run] for run in rows]
    assert json.dumps(measured[0]) == json.dumps(measured[1])
