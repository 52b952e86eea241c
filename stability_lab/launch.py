"""The command `train`: checks every job, then lets Hydra run them, one run directory each."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stability_lab.compose import CommandLine, Composed, checked, compose_jobs, read_command_line, refuse_distributed
from stability_lab.config import ConfigError, config_dir
from stability_lab.naming import sweep_name

_log = logging.getLogger("stability_lab")
JOBS = "jobs.jsonl"  # in a sweep's folder: one line a finished job


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. ConfigError before anything is created."""
    refuse_distributed()
    command = read_command_line(argv)
    if command.only_shows:
        _check_composition(command)
        return _run_hydra(command, [])
    composed = compose_jobs(command)
    resumed = next((job for job in composed if job.config.resume is not None), None)
    if resumed is not None:
        composed = [_of_the_run(command, resumed)]
    from stability_lab.build import check

    for job in composed:
        check(job.config, must_fit=True)
    if any(job.config.trainer.deterministic for job in composed):
        # cuBLAS reads it once, at the first product of the process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if resumed is not None:
        from stability_lab.run import go_on_with

        return go_on_with(Path(resumed.config.resume or ""), composed[0], command.overrides, sys.argv).exit_code
    if not command.multirun:
        return _run_hydra(command, [])
    return _sweep(command, composed)


def _of_the_run(command: CommandLine, asked: Composed) -> Composed:
    """For `resume=RUN`: the run's own configuration with what else the command asks for."""
    from stability_lab.resume import read_config, with_overrides

    run = asked.config.resume or ""
    if command.multirun:
        raise ConfigError(f"resume={run}: goes without -m; a sweep goes on with what is unfinished by its own command")
    if asked.config.if_exists is not None:
        raise ConfigError(f"if_exists={asked.config.if_exists}: has no meaning beside resume={run}; leave one out")
    return with_overrides(read_config(Path(run)), asked, command.jobs[0])


def _check_composition(command: CommandLine) -> None:
    """`--cfg job` shows what was asked for, or says what is wrong with it; `--help` needs no check."""
    if "--cfg" in command.flags or "-c" in command.flags:
        compose_jobs(command)


def _run_hydra(command: CommandLine, extra: list[str]) -> int:
    import hydra

    argv = sys.argv
    sys.argv = ["stability_lab train", *command.flags, *command.overrides, *extra]
    outcomes: list[int] = []
    refused: list[ConfigError] = []

    def task(cfg: Any) -> int:
        try:
            outcomes.append(_job(cfg, argv))
        except ConfigError as error:
            refused.append(error)  # Hydra would print a traceback
            return 2
        return outcomes[-1]

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()
    finally:
        sys.argv = argv
    if refused and not command.multirun:
        raise refused[0]
    return outcomes[-1] if outcomes else 0


def _job(cfg: Any, argv: Sequence[str]) -> int:
    """One job inside Hydra. Raises for an interruption, and ConfigError where its folder cannot be had."""
    from hydra.core.hydra_config import HydraConfig

    from stability_lab.run import Outcome, execute

    hydra_config = HydraConfig.get()
    in_sweep = hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN"
    number = int(hydra_config.job.num) + 1 if in_sweep else None
    overrides = list(hydra_config.overrides.task)
    started = time.time()
    try:
        outcome = execute(checked(cfg), overrides, argv, in_sweep=in_sweep, number=number)
    except ConfigError as error:
        if not in_sweep:
            raise
        _log.error("job %s: error: %s", number, error)
        outcome = Outcome(Path(), "failed", None, None, 2)
    if in_sweep:
        record = {
            "job": number,
            **outcome._asdict(),
            "path": str(outcome.path),
            "seconds": time.time() - started,
        }
        with (Path(hydra_config.sweep.dir) / JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if outcome.exit_code in (130, 143):
            raise KeyboardInterrupt
    return outcome.exit_code


def _sweep(command: CommandLine, composed: list[Composed]) -> int:
    first = composed[0].config
    group = first.group or sweep_name(command.swept, command.overrides)
    folder = Path(first.output_dir) / group
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={first.output_dir}: cannot create {folder}: {error.strerror}") from error
    jobs_file = folder / JOBS
    known = len(_read_jobs(jobs_file))
    _log.info("sweep of %d runs in %s", len(composed), folder)
    code = 0
    try:
        _run_hydra(command, [f"++group={group}", f"hydra.sweep.dir={_quoted(folder)}"])
    except KeyboardInterrupt:
        code = 130
    jobs = _read_jobs(jobs_file)[known:]
    _log.info("%s", _table(jobs))
    if any(job["status"] == "failed" for job in jobs) or (not code and len(jobs) < len(composed)):
        return 1
    return max([code, *(job["exit_code"] for job in jobs if job["status"] == "interrupted")])


def _quoted(path: Path) -> str:
    """A path as a Hydra value."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _read_jobs(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(jobs: list[dict[str, Any]]) -> str:
    lines = [f"{'job':>4}  {'status':<12} {'verdict':<12} {'val/loss':>9} {'seconds':>8}  run"]
    for job in sorted(jobs, key=lambda j: j["job"]):
        loss = "-" if job["val_loss"] is None else f"{job['val_loss']:.4f}"
        verdict = job["verdict"] or "-"
        lines.append(
            f"{job['job']:>4}  {job['status']:<12} {verdict:<12} {loss:>9} {job['seconds']:>8.1f}  {job['path']}"
        )
    return "\n".join(lines)
