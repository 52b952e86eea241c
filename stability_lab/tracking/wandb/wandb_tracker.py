"""Mirror of a run in Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability_lab.tracking.manifest import redact
from stability_lab.tracking.run_files import EVENTS, METRICS, read_rows
from stability_lab.tracking.tracker import NullTracker, RunInfo, Tracker
from stability_lab.tracking.wandb.environment import NO_PROJECT, asked_mode, drop_unusable, is_set_up, project_of
from stability_lab.tracking.wandb.login import NO_KEY, first_line, problem

_log = logging.getLogger("stability_lab")

# The small files of a run that its mirror keeps as well, in a folder of their own, for W&B writes a config.yaml too.
CONFIG, MANIFEST, SUMMARY = "config.yaml", "manifest.json", "summary.json"
FILES, FOLDER = (CONFIG, MANIFEST, SUMMARY, METRICS, EVENTS), "stability_lab"
_MOST_BYTES = 2**24  # a longer file stays on disk only: the rows are in the history anyway

MODES = ("auto", "online", "offline", "disabled")
# Limits of the service on ids, names and tags; an id also becomes part of a file name.
_MAX_ID, _MAX_NAME, _MAX_TAG = 96, 128, 64
NOT_SET_UP = "not recorded: W&B is not set up here (wandb login; or tracking.mode=offline, for a later upload)"
# An upload that has not ended by then is given up: the files on disk can still be synced.
_FINISH_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class WandbTracking:
    """Settings of the mirror.

    `project` None is WANDB_PROJECT, else `stability_lab`. `mode` is `auto` (WANDB_DISABLED or WANDB_MODE if set, else
    online with a configured key, else offline, but nothing where no sign of W&B is found: a recording that nobody asked
    for costs seconds of each run), `online`, `offline` or `disabled`. `init_timeout_s` bounds the wait for
    the server, after which the run is recorded offline.
    """

    project: str | None = None
    entity: str | None = None
    mode: str = "auto"
    init_timeout_s: float = 8.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, but must be one of {', '.join(MODES)}")
        if not (math.isfinite(self.init_timeout_s) and self.init_timeout_s > 0):
            raise ValueError(f"init_timeout_s is {self.init_timeout_s!r}, but must be a number of seconds > 0")
        if self.project == "":
            raise ValueError("project is empty, but must name a W&B project")
        if set(self.project or "") & set(NO_PROJECT):
            raise ValueError(f"project is {self.project!r}, but a W&B project has none of {' '.join(NO_PROJECT)}")

    def start(self, run_info: RunInfo) -> Tracker:
        """Open a W&B run below `run_info.dir / "wandb"`; whatever fails is one warning and no mirror."""
        if self.mode == "disabled":
            return NullTracker()
        try:
            tracker = _start(self, run_info)
            if run_info.resume_id is not None and isinstance(tracker, _WandbRun):
                tracker.fill()
            return tracker
        except Exception as error:
            _log.warning("W&B does not work here (%s); tracking=local runs without it", first_line(error))
            return NullTracker()


class _WandbRun:
    def __init__(self, run: Any, directory: Path, *, offline: bool) -> None:
        self._run, self._directory, self._files, self._offline = run, directory, directory / "wandb", offline
        self.id: str | None = run.id

    @property
    def hint(self) -> str:
        if not self._offline:
            return self._run.url or self._sync("run-*")
        return self._sync("offline-run-*")

    def _sync(self, pattern: str) -> str:
        # The names begin with the time of the start: a resumed run must be synced after its first part.
        parts = sorted(self._files.glob(f"{pattern}-{self.id}"))
        return " ".join(["wandb sync", *(shlex.quote(str(part)) for part in parts)])

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._run.log(dict(row))

    def fill(self) -> None:
        """Log the rows of `metrics.jsonl` that no earlier part of this run has: a kill takes what was on its way.

        The parts lie on disk, also those that were recorded online; of these W&B has got the first `step` records.
        """
        metrics, known = self._directory / METRICS, set[Any]()
        try:
            for part in self._files.glob(f"*run-*-{self.id}"):
                log = part / f"run-{self.id}.wandb"
                if part != Path(self._run.dir).parent and log.is_file():
                    sent = math.inf if self._offline else self._run.step
                    rows, _ = read_offline_run(log)
                    known |= {row.get("step") for row in rows if "tokens" in row and row.get("_step", 0) < sent}
            self.log([row for row in read_rows(metrics) if row.get("step") not in known] if metrics.is_file() else [])
        except (OSError, ValueError) as error:
            _log.warning("W&B may lack rows of before the resume (%s); metrics.jsonl has them", first_line(error))

    def event(self, event: Mapping[str, Any]) -> None:
        if "event" not in event or "step" not in event:
            return
        numbers = {
            f"event/{event['event']}/{key}": value
            for key, value in event.items()
            if key != "step" and isinstance(value, (int, float))
        }
        self._run.log({"step": event["step"], f"event/{event['event']}": 1, **numbers})

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        # Final values once more under the names of the history, where panels and tables look for them.
        final = {key.removeprefix("final."): value for key, value in summary.items() if key.startswith("final.")}
        # W&B makes null of a NaN in a summary; in its history it writes the word.
        self._run.summary.update(
            {key: "NaN" if value != value else value for key, value in {**final, **summary}.items()}
        )
        if summary.get("verdict"):
            self._run.tags = (*(self._run.tags or ()), f"verdict:{summary['verdict']}")
        self._save_files()
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError as error:
            raise TimeoutError(f"the upload to W&B did not end in time; later: {self._sync('run-*')}") from error

    def _save_files(self) -> None:
        try:
            kept = Path(self._run.dir)
            (kept / FOLDER).mkdir(exist_ok=True)
            for source in (self._directory / name for name in FILES):
                if source.is_file() and source.stat().st_size <= _MOST_BYTES:
                    # A copy, so that an offline run may be moved.
                    copy = shutil.copyfile(source, kept / FOLDER / source.name)
                    self._run.save(str(copy), base_path=str(kept), policy="end")
        except Exception as error:
            _log.warning("the run's files could not be added to its W&B run (%s)", first_line(error))


def _start(tracking: WandbTracking, run_info: RunInfo) -> Tracker:
    began = time.monotonic()
    mode = tracking.mode
    if mode == "auto":
        mode = asked_mode(os.environ)
    if mode == "disabled":
        return NullTracker()
    named = tracking.project or tracking.entity or run_info.resume_id
    if mode == "auto" and not named and not is_set_up(os.environ):
        return NullTracker(NOT_SET_UP)

    # Its reports to its makers fail loudly, and late, where there is no network.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    drop_unusable()
    files = run_info.dir.resolve() / "wandb"
    run_id = run_info.resume_id or run_id_from(run_info.name)
    with _service_log_below(files):
        # A run that waits for a dead server would also hold up the end of the process, so that is asked first.
        trouble = problem(tracking.init_timeout_s / 2) if mode != "offline" else None
        if mode != "offline" and trouble is None:
            try:
                timeout_s = max(1.0, tracking.init_timeout_s - (time.monotonic() - began))
                run = _init(wandb, tracking, run_info, run_id, "online", timeout_s)
                return _WandbRun(run, files.parent, offline=False)
            except Exception as error:
                trouble = f"W&B did not take the run ({first_line(error)})"
                if run_info.resume_id is None:
                    for empty in files.glob(f"run-*-{run_id}"):
                        shutil.rmtree(empty, ignore_errors=True)
                # The service does not give the id of the failed attempt free until the process ends.
                run_id = run_id_from(run_info.name)
        if trouble is not None and not (mode == "auto" and trouble == NO_KEY):
            _log.warning("%s; this run is recorded offline", trouble)
        run = _init(wandb, tracking, run_info, run_id, "offline", tracking.init_timeout_s)
        return _WandbRun(run, files.parent, offline=True)


def _init(wandb: Any, tracking: WandbTracking, run_info: RunInfo, run_id: str, mode: str, timeout_s: float) -> Any:
    wandb.setup(settings=wandb.Settings(mode=mode, silent=True))
    run = wandb.init(
        project=tracking.project or project_of(os.environ),
        entity=tracking.entity,
        mode=mode,
        id=run_id,
        # Offline too: the record says so, and `wandb sync` then appends to the first part instead of replacing it.
        resume="allow" if run_info.resume_id else None,
        reinit="create_new",
        name=run_info.name[:_MAX_NAME],
        group=run_info.group[:_MAX_NAME] if run_info.group else None,
        tags=list(dict.fromkeys(tag[:_MAX_TAG] for tag in run_info.tags if tag)),
        notes=run_info.notes,
        job_type="train",
        config=redact({**grouping_keys(run_info.config), **run_info.config}),
        dir=str(run_info.dir.resolve()),
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            init_timeout=timeout_s,
            finish_timeout=_FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )
    run.define_metric("step")
    run.define_metric("tokens")
    # One NaN would stay in W&B's own summaries for ever, so there are none.
    run.define_metric("*", step_metric="step", summary="none")
    return run


def grouping_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys by which people group runs, at the top of the config: `stabilizers` (`qknorm+zloss`, or `none`), `lr`
    and `model_name`; only those that the config has."""
    keys: dict[str, Any] = {}
    if isinstance(config.get("stabilizer"), Mapping):
        keys["stabilizers"] = "+".join(sorted(config["stabilizer"])) or "none"
    for key, group, name in (("lr", "optimizer", "lr"), ("model_name", "model", "name")):
        values = config.get(group)
        if isinstance(values, Mapping) and name in values:
            keys[key] = values[name]
    return keys


def run_id_from(name: str) -> str:
    """A readable id of letters, digits, dots, underscores and dashes that no other run has."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_MAX_ID] or "run"
    return f"{slug}-{secrets.token_hex(3)}"


def read_offline_run(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The logged rows of a `.wandb` file as wandb itself reads them, and what is wrong with the file.

    A run that was killed gives what it got to, and of a damaged file wandb leaves out what it cannot read.

    Raises `ValueError` with wandb's own words where it cannot read the file.
    """
    command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(path.resolve())]
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, env=environment, timeout=_READ_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"wandb did not read it within {_READ_TIMEOUT_S:g} s") from error
    words = [line.split(": ", 1)[-1] for line in done.stderr.decode(errors="replace").strip().splitlines()]
    if done.returncode:
        raise ValueError(f"wandb cannot read it: {words[-1] if words else 'it gives no reason'}")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    rows = [record["history"].get("item", {}) for record in records if record.get("type") == "history"]
    notes = [f"wandb {word}: {len(rows):,} rows were read." for word in words]
    if not any(record.get("type") == "exit" for record in records):
        notes.append(f"The file lacks the end of the run, which may still go on or was killed: {len(rows):,} rows.")
    return rows, notes


@contextmanager
def _service_log_below(files: Path) -> Iterator[None]:
    """Keep the log of wandb's service process, which it would put into the home directory, inside the run.

    The process starts with the first run and serves all later ones: its log stands in the first directory.
    """
    if "WANDB_CACHE_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_CACHE_DIR"] = str(files / "cache")
    try:
        yield
    finally:
        del os.environ["WANDB_CACHE_DIR"]
