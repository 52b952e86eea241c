"""Going on with a run: what its folder holds, what may differ from it, and from where it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from stability_lab.build import load_data
from stability_lab.compose import Composed, composed_of
from stability_lab.config import ConfigError, TrainConfig, by_value, may_change_on_resume, typed
from stability_lab.disk.files import read_text, why_unreadable
from stability_lab.plugins.instantiate import typed_options
from stability_lab.plugins.trust import code_version
from stability_lab.run.folder import CONFIG, MANIFEST, SUMMARY, is_finished, read_object
from stability_lab.text import flatten, written
from stability_lab.tracking.manifest import redact, versions
from stability_lab.tracking.run_files import EVENTS, METRICS, RunFiles, steps_until
from stability_lab.tracking.tracker import valid_id
from stability_lab.training.checkpoint import NOTHING, FoundCheckpoint, adopt, find_newest
from stability_lab.training.loop import Loop, Run
from stability_lab.training.schedule import Schedule

MAX_STEPS = "trainer.max_steps"
_NONE = "nothing"


@dataclass(frozen=True)
class Start:
    """Where a run begins: before its first step, or after `step`, which `found` has the state of.

    `known` is the plain part of that state, `manifest` that of the run's first part, and `changed` says of each key of
    the configuration that is another now what it was and is.
    """

    resumes: bool = False
    found: FoundCheckpoint = NOTHING
    step: int = 0
    known: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()  # steps up to `step` whose rows are no longer in metrics.jsonl
    notices: tuple[str, ...] = ()

    @property
    def tracker_id(self) -> str | None:
        """The tracker id of the run's first part, unless no tracker can have given it."""
        ids = (self.known.get("tracker_id"), self.manifest.get("tracker_id"))
        return next((known for known in ids if valid_id(known)), None)


def read_config(run: Path) -> dict[str, Any]:
    """config.yaml of a run as plain values; ConfigError where it is missing or no YAML of keys."""
    file = run / CONFIG
    if not file.is_file():
        raise ConfigError(f"{run} is not a run's folder: it has no {CONFIG}")
    try:
        plain = yaml.safe_load(read_text(file))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {why_unreadable(error)}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{file} cannot be read: it does not hold keys and their values")
    return plain


def with_overrides(saved: Mapping[str, Any], asked: Composed, overrides: Iterable[str]) -> Composed:
    """The run's own configuration, and of the command's (`asked`) only the keys that the command names."""
    plain: dict[str, Any] = dict(saved)
    for line in overrides:
        path = line.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".").split(".")
        if path[0] in ("hydra", "resume"):
            continue
        # A copy along the path, so that the saved values stay what they are.
        target, source = plain, asked.plain
        for name in path[:-1]:
            target[name] = dict(target[name]) if isinstance(target.get(name), Mapping) else {}
            target, source = target[name], source.get(name) or {}
        if path[-1] in source:
            target[path[-1]] = source[path[-1]]
        else:
            target.pop(path[-1], None)
    composed = composed_of(plain, asked.notices)
    return composed._replace(plain=typed_options(composed.plain))


def prepare(path: Path, composed: Composed) -> Start:
    """What to go on from; changes nothing. ConfigError where the run's configuration or data are others now."""
    found = find_newest(path / "checkpoints")
    known = found.state.plain if found.state is not None else {}
    # What the weights came from is what the checkpoint says, whatever was done to the file since.
    config = known.get("config")
    saved, now = _keys(config if isinstance(config, dict) else read_config(path)), _keys(redact(composed.plain))
    changed = {key: (saved.get(key, _NONE), now.get(key, _NONE)) for key in sorted(saved.keys() | now.keys())}
    changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
    for key, (before, after) in changed.items():
        if not may_change_on_resume(key):
            raise ConfigError(
                f"{key}={written(after)}: the run in {path} has {written(before)}, and a run that goes on keeps it; "
                "leave it out, or start another run"
            )
    step, steps = known.get("step", 0), composed.config.trainer.max_steps
    if step > steps:
        raise ConfigError(f"{MAX_STEPS}={steps}: the run in {path} has come to step {step} already")
    if step and known.get("data") != (here := load_data(composed.config).fingerprint):
        raise ConfigError(
            f"data: the run in {path} was trained on other data (fingerprint {known.get('data')}, and now {here}); "
            "it goes on with its own or not at all"
        )
    lost = tuple(sorted(set(range(1, step + 1)) - steps_until(path / METRICS, step)))
    notices = (*_notices(path, found, changed, composed.config, step), *_lost(lost, step))
    return Start(True, found, step, known, read_object(path / MANIFEST), changed, lost, notices)


def is_complete(path: Path, config: TrainConfig) -> bool:
    """Whether the run has ended, and no further step is asked for."""
    summary = read_object(path / SUMMARY)
    steps = summary.get("steps")
    more = summary.get("status") == "completed" and isinstance(steps, int) and config.trainer.max_steps > steps
    return is_finished(summary) and not more


def go_on(start: Start, loop: Loop, files: RunFiles) -> None:
    """Put the loop where the checkpoint was; only then make the folder say so. ConfigError: nothing was changed."""
    if start.found.state is not None:
        try:
            loop.load_state(start.found.state)
        except ValueError as error:
            raise ConfigError(f"{start.found.path} does not hold this run's state: {error}") from error
    adopt(start.found)
    for name in (METRICS, EVENTS):
        files.set_aside(name, start.step)
    files.replace_events([event.as_dict() for event in loop.watch.events_so_far()] if start.step else [])


def resumed_manifest(start: Start, first: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """The manifest of the run's first part, with one entry more under `resumes`; `first` where it had none."""
    old = dict(start.manifest) or dict(first)
    entry = {
        "step": start.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "argv": redact(list(argv)),
    }
    if start.lost:
        entry["lost_rows"] = len(start.lost)
    if start.changed:
        entry["changed"] = {key: list(pair) for key, pair in start.changed.items()}
    if MAX_STEPS in start.changed:
        # It now computes what neither the first command nor a new one of this length would.
        entry["fingerprint_before"] = old.get("fingerprint")
        old |= {"fingerprint": first["fingerprint"], "data": first["data"]}
    known = old.get("resumes")
    return {**old, "resumes": [*(known if isinstance(known, list) else []), entry]}


def machine(run: Run) -> dict[str, Any]:
    """What, beside the configuration, decides over the last bits of a result."""
    return {
        "stability_lab": code_version(vars(run.config)),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.size,
        "compile": run.config.trainer.compile,
        "implementation": run.config.model.implementation,
        "deterministic": run.config.trainer.deterministic,
        "attention": run.model.backend.name,
    }


def moved(start: Start, run: Run) -> str | None:
    """A sentence where the run goes on elsewhere than it was, and so not bit for bit."""
    if not start.step:
        return None
    known, now = start.known.get("machine"), machine(run)
    before = known if isinstance(known, dict) else {}
    other = [f"{key} {now[key]} (was {before.get(key)})" for key in now if now[key] != before.get(key)]
    if not other:
        return None
    return f"the run goes on with {', '.join(other)}: its results are not bit for bit those of a run without a stop"


def _notices(
    path: Path, found: FoundCheckpoint, changed: Mapping[str, tuple[Any, Any]], config: TrainConfig, step: int
) -> Iterable[str]:
    for checkpoint, reason in found.damaged.items():
        yield f"{checkpoint} is damaged ({reason}) and is not used; it is kept under another name"
    if step:
        yield f"the run goes on after step {step} ({found.path})"
    else:
        why = "" if config.trainer.save_weights else ", for trainer.save_weights=false keeps none"
        yield f"{path} has no checkpoint to go on from{why}: the run starts over"
    if MAX_STEPS in changed and step:
        yield _other_length(changed[MAX_STEPS][0], config, step)


def _lost(lost: Sequence[int], step: int) -> Iterable[str]:
    """The rows are not there, whoever took them; the checkpoint has what the verdict is made from."""
    if lost:
        yield (
            f"{METRICS} lacks {len(lost):,} of the {step:,} rows before the checkpoint, the first of step {lost[0]:,}: "
            f"curves will have this gap, and the verdict has none, for the checkpoint keeps the series that it judges; "
            f"what follows an unreadable line is kept in {METRICS}.after-step-{step}-1"
        )


def _other_length(before: Any, config: TrainConfig, step: int) -> str:
    steps, peak = config.trainer.max_steps, config.lr
    text = f"{MAX_STEPS} is {steps} and was {before}"
    if step == steps or not isinstance(before, int) or before < step:
        return text
    was = Schedule.of(config.schedule, peak, before).lr(step)
    now = Schedule.of(config.schedule, peak, steps).lr(step + 1)
    return (
        f"{text}: the schedule is that of {steps} steps from here on, so the learning rate goes from {was:.3g} to "
        f"{now:.3g}, and the run is neither one of {before} steps nor one of {steps}"
    )


def _keys(plain: Mapping[str, Any]) -> dict[str, Any]:
    """All keys with their values, and the stabilizers' names in front of their options."""
    names = plain.get("stabilizer")
    chosen = f"[{','.join(sorted(names))}]" if isinstance(names, dict) else names
    return by_value(flatten(typed(plain))) | {"stabilizer": chosen}
