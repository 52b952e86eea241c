"""One training run from its checked configuration to its files, its mirror and its last words."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from stability_lab.build import build_run, device_of
from stability_lab.compose import Composed
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.diagnostics.memory import peak_bytes, reset_peak
from stability_lab.judge.series import Row
from stability_lab.judge.watch import without_verdict
from stability_lab.plugins.instantiate import instantiate, typed_options
from stability_lab.plugins.trust import code_version
from stability_lab.run.compiling import settled
from stability_lab.run.facts import facts, opening
from stability_lab.run.folder import (
    CONFIG,
    MANIFEST,
    SINGLE_RUNS,
    SUMMARY,
    FolderClaim,
    claim_directory,
    claim_run,
    read_object,
    run_name,
)
from stability_lab.run.last_words import last_words
from stability_lab.run.progress import Progress, short_name
from stability_lab.run.resume import Start, go_on, is_complete, machine, moved, prepare, resumed_manifest
from stability_lab.run.signals import CTRL_C, Interruption, Terminated, interruption
from stability_lab.run.signals import EXIT_CODES as STOP_CODES
from stability_lab.text import flatten, shown, written
from stability_lab.tracking.manifest import fingerprint, manifest, redact
from stability_lab.tracking.run_files import RunFiles
from stability_lab.tracking.tracker import Mirror, RunInfo, Tracker
from stability_lab.training.checkpoint import NOTHING, CheckpointError, Checkpoints, is_resumable
from stability_lab.training.inject import ENDS_THE_PROCESS, Injector, parse
from stability_lab.training.loop import Loop, Run
from stability_lab.training.ranks import ONE, Ranks

_log = logging.getLogger("stability_lab")
EXIT_CODES = {"completed": 0, "failed": 1, "diverged": 3}


class Outcome(NamedTuple):
    path: Path
    status: str
    verdict: str | None
    val_loss: float | None
    exit_code: int
    reason: str | None = None  # why it failed or was interrupted
    skipped: bool = False  # it was already finished


def execute(
    composed: Composed,
    overrides: Sequence[str],
    argv: Sequence[str],
    number: int | None = None,
    swept: Sequence[str] = (),
    ranks: Ranks = ONE,
) -> Outcome:
    """Train; whatever happens, what was measured is on disk and the outcome says how the run ended.

    `number` is that of a job of a sweep over the keys `swept`, which alone make the run's name. `ranks`: this is the
    first of them.
    """
    in_sweep = number is not None
    asked = composed._replace(plain=typed_options(composed.plain))
    composed = settled(asked)
    config = composed.config
    digest = fingerprint(composed.plain, code_version(composed.plain))
    told = [line for line in overrides if not in_sweep or line.lstrip("+~").partition("=")[0] in swept]
    claim = claim_directory(
        Path(config.output_dir) / (config.group or SINGLE_RUNS) / (config.run_name or _name(config, told, digest)),
        config.if_exists or ("skip" if in_sweep else "new"),
        digest,
    )
    if config.if_exists == "resume" and not claim.resumes and claim.lock is not None:
        _log.info("notice: no run of this configuration is there yet: %s starts", shown(claim.path))
    return _execute(claim, settled(asked, claim.path) if claim.resumes else composed, overrides, argv, number, ranks)


def go_on_with(
    path: Path, composed: Composed, overrides: Sequence[str], argv: Sequence[str], ranks: Ranks = ONE
) -> Outcome:
    """The same for the run in `path`, from its newest checkpoint."""
    return _execute(claim_run(path), composed, overrides, argv, None, ranks)


def _execute(
    claim: FolderClaim,
    composed: Composed,
    overrides: Sequence[str],
    argv: Sequence[str],
    number: int | None,
    ranks: Ranks,
) -> Outcome:
    path = claim.path
    try:
        start = prepare(path, composed) if claim.resumes else Start()
        if claim.lock is None or (claim.resumes and is_complete(path, composed.config)):
            how = "a larger trainer.max_steps goes on" if claim.resumes else "if_exists=new runs it again"
            _log.info("%s is already finished: skipped (%s)", path, how)
            ranks.told(None)
            return _known(path)
        ranks.told((path, claim.resumes))
        ranks.any(False)  # the others have read the checkpoint that this one is about to rename
        with interruption() as stop:
            try:
                with _open_files(path) as files:
                    return Job(composed, list(overrides), list(argv), number, files, start, stop, ranks).train()
            except (KeyboardInterrupt, Terminated):  # once more, while the run's last words were written
                reason = stop.reason or CTRL_C
                return Outcome(path, "interrupted", None, None, STOP_CODES[reason])
            except OSError as error:  # already its first files cannot be written
                _log.error("failed: %s could not be written: %s", error.filename or path, error.strerror or error)
                return Outcome(path, "failed", None, None, EXIT_CODES["failed"])
    finally:
        if claim.lock is not None:
            claim.lock.release()


@dataclass
class Job:
    """One run, or one part of a run that was interrupted, in a folder that is its own."""

    composed: Composed
    overrides: list[str]
    argv: list[str]
    number: int | None
    files: RunFiles
    start: Start
    stop: Interruption
    ranks: Ranks
    run: Run | None = None
    loop: Loop | None = None
    tracker: Tracker | None = None

    def train(self) -> Outcome:
        config, path = self.composed.config, self.files.path
        job = f"job {self.number}: " if self.number is not None else ""
        told = {"in_sweep": True}
        _log.info("%sstabilizers: %s", job, ", ".join(sorted(config.stabilizer)) or "none", extra=told)
        notices = [*self.composed.notices, *self.start.notices, *_notices(config)]
        for notice in notices:
            _log.info("notice: %s", notice, extra=told)
        if not self.start.resumes:
            self._write_first()
        status, reason = "failed", None
        try:
            progress = self._prepare(notices)
            assert self.loop is not None
            self.stop.can_wait, self.stop.patient = True, self.ranks.size > 1
            try:
                self.loop.train()
            finally:
                self.stop.can_wait = False
                progress.close()
            status = {None: "completed", "interruption": "interrupted"}.get(self.loop.stopped_by, "diverged")
            reason = self.stop.reason if status == "interrupted" else None
        except (KeyboardInterrupt, Terminated):
            status, reason = "interrupted", self.stop.reason or CTRL_C
        except ConfigError as error:
            if self.start.resumes:  # nothing of what the run has was touched
                raise
            reason = str(error)
            _log.error("error: %s", error)
        except CheckpointError as error:
            reason = str(error)
            _log.error("failed: %s; the checkpoints before it and metrics.jsonl are as they were", error)
        except Exception as error:
            if self.stop.reason is not None and "CppCompileError" in f"{type(error).__name__} {error}":
                # A signal to the whole process group has ended the compiler too.
                return self._finish("interrupted", self.stop.reason, STOP_CODES[self.stop.reason])
            reason = _what_failed(error, config)
            _log.error("failed: %s (traceback in %s)", reason, path / "train.log")
            _log.debug("traceback", exc_info=error)
        exit_code = STOP_CODES.get(reason or "", EXIT_CODES.get(status, 1))
        return self._finish(status, reason, exit_code)

    def _write_first(self) -> None:
        self.files.write_text(CONFIG, OmegaConf.to_yaml(OmegaConf.create(redact(self.composed.plain))))
        self.files.write_json(SUMMARY, {"status": "running"})

    def _prepare(self, notices: list[str]) -> Progress:
        """Everything up to the first step; of a run that goes on, its files are touched last."""
        config, files, start = self.composed.config, self.files, self.start
        reset_peak(device_of(config))
        self.run = run = build_run(config, self.ranks)
        for notice in run.data.notices:
            _log.info("notice: %s", notice, extra={"in_sweep": True})
        notices += run.data.notices
        first = manifest(self.argv, {"run": files.path.name, **facts(run, self.composed, self.overrides, notices)})
        checkpoints = self._checkpoints(run, first["fingerprint"]) if config.trainer.save_weights else None
        faults = parse(config.debug.inject, config.trainer.max_steps)
        if start.resumes:
            faults = tuple(fault for fault in faults if fault.kind not in ENDS_THE_PROCESS)
        job = "" if self.number is None else f"job {self.number} "
        progress = Progress(config.trainer.max_steps, job + short_name(config), start.step)
        self.loop = loop = Loop(run, _Sink(self, progress), Injector(faults), checkpoints, self.stop.asked)
        if start.resumes:
            go_on(start, loop, files)
            self.start = replace(start, found=NOTHING)  # its tensors are in the model now
            first = resumed_manifest(start, first, self.argv)
            if start.changed:
                self._write_first()
            files.write_json(SUMMARY, {"status": "running"})
            if (elsewhere := moved(start, run)) is not None:
                _log.info("notice: %s", elsewhere)
        self.tracker = _tracker(run, self.composed, files.path, start.tracker_id)
        if checkpoints is not None:
            checkpoints.facts |= {"fingerprint": first["fingerprint"], "tracker_id": self.tracker.id}
        files.write_json(MANIFEST, redact(first | {"tracker_id": self.tracker.id}))
        _log.info("%s", opening(run))
        return progress

    def _checkpoints(self, run: Run, digest: str) -> Checkpoints:
        trainer = run.config.trainer
        facts = {
            "config": redact(self.composed.plain),
            "fingerprint": digest,
            "data": run.data.fingerprint,
            "machine": machine(run),
        }
        folder = self.files.path / "checkpoints"
        return Checkpoints(folder, trainer.checkpoint_every, trainer.keep_checkpoints, facts, self.files.sync)

    def _finish(self, status: str, reason: str | None, exit_code: int) -> Outcome:
        run, loop, files = self.run, self.loop, self.files
        summary: dict[str, Any] = {"status": status, "exit_code": exit_code}
        if run is not None and loop is not None:
            summary |= self._judged(run, loop, status)
            # The judge has the last word: a finite divergence ends a run as a non-finite one does.
            if summary["status"] == "completed" and summary["verdict"] == "diverged":
                summary |= {"status": "diverged", "exit_code": EXIT_CODES["diverged"]}
            if status == "failed":
                summary = without_verdict(summary)
        if reason is not None:
            summary["ended_by"] = reason
        try:
            files.write_json(SUMMARY, redact(summary))
        except OSError as error:
            _log.error(
                "failed: summary.json could not be written (%s); metrics.jsonl has what was measured", error.strerror
            )
            summary = without_verdict(summary) | {"status": "failed", "exit_code": EXIT_CODES["failed"]}
        if self.tracker is not None:
            known = {key: value for key, value in flatten(summary).items() if value not in (None, {})}
            self.tracker.finish(known, summary["exit_code"])
        if loop is not None:
            _log.info("%s", last_words(summary, files.path, self.tracker))
        if summary["status"] in ("interrupted", "failed") and is_resumable(files.path / "checkpoints"):
            _log.info("to go on: python -m stability_lab train resume=%s", shlex.quote(str(files.path)))
        final = summary.get("final", {}).get("val/loss")
        return Outcome(files.path, summary["status"], summary.get("verdict"), final, summary["exit_code"], reason)

    def _judged(self, run: Run, loop: Loop, status: str) -> dict[str, Any]:
        if status in ("interrupted", "failed"):
            try:
                loop.flush()
            except Exception as error:  # the device itself may have failed
                _log.debug("the last steps could not be read", exc_info=error)
        judgement, summary = loop.judge()
        try:
            self.files.replace_events([event.as_dict() for event in judgement.events] if judgement else [])
        except OSError as error:
            _log.error("events.jsonl could not be completed: %s", error.strerror)
        for note in summary.get("notes", ()):
            _log.info("note: %s", note)
        if run.optimal_loss is not None:
            summary["optimal_loss"] = run.optimal_loss
        return summary | {"perf/peak_memory_bytes": peak_bytes(run.device)}


class _Sink:
    def __init__(self, job: Job, progress: Progress):
        self.job, self.progress = job, progress

    def rows(self, rows: Sequence[Row]) -> None:
        self.job.files.log_rows(rows)
        if self.job.tracker is not None:
            self.job.tracker.log(rows)
        self.progress.show(rows[-1])

    def event(self, event: Mapping[str, Any]) -> None:
        self.job.files.log_event(dict(event))
        if self.job.tracker is not None:
            self.job.tracker.event(event)


def _name(config: TrainConfig, overrides: Sequence[str], digest: str) -> str:
    values = flatten(asdict(config))
    pairs = {"optimizer.lr": f"{config.lr:g}", "seed": str(config.seed)}
    for line in overrides:
        key, _, value = line.lstrip("+~").partition("=")
        group, _, option = key.partition(".")
        unused = group == "stabilizer" and option.split(".")[0] not in config.stabilizer
        if not unused and key not in ("optimizer.lr", "seed"):
            pairs[key] = written(values[key]) if key in values else value
    return run_name(config.stabilizer, pairs.items(), digest)


def _known(path: Path) -> Outcome:
    summary = read_object(path / SUMMARY)
    final = summary.get("final")
    loss = final.get("val/loss") if isinstance(final, dict) else None
    return Outcome(path, summary["status"], summary.get("verdict"), loss, EXIT_CODES[summary["status"]], skipped=True)


def _notices(config: TrainConfig) -> Iterator[str]:
    if config.recipe is not None:
        lacks = "; ".join(config.recipe["lacks"])
        yield f"recipe {config.recipe['name']} ({config.recipe['source']}) lacks: {lacks}"
    for name, told in (config.stressor or {}).items():
        yield f"stressor {name}: {told['summary']}; docs/stressors.md says what to look for"
    warmup, steps = config.schedule.warmup_steps, config.trainer.max_steps
    if warmup > steps:
        yield f"schedule.warmup_steps={warmup} is longer than the run and cut to its {steps} steps"


def _tracker(run: Run, composed: Composed, path: Path, resume_id: str | None) -> Mirror:
    tracking = instantiate(run.config.tracking, "tracking")
    tags = tuple(s.name for s in run.stabilizers) or ("none",)
    group = path.absolute().parent.name
    return Mirror(tracking.start(RunInfo(path.name, group, tags, redact(composed.plain), path, resume_id=resume_id)))


def _what_failed(error: Exception, config: TrainConfig) -> str:
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error):
        half = max(1, config.trainer.micro_batch_size // 2)
        return f"out of memory: try trainer.micro_batch_size={half} with more trainer.grad_accum_steps ({text})"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {text}"


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is reported once, by the run, and not by every line that is lost."""


@contextmanager
def _open_files(path: Path) -> Iterator[RunFiles]:
    files = RunFiles(path)
    handler = _LogFile(path / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.DEBUG)
    _log.addHandler(handler)
    try:
        yield files
    finally:
        files.close()
        _log.removeHandler(handler)
        with suppress(OSError):
            handler.close()
