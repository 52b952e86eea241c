"""The command `train`: checks every job, then lets Hydra run them, one run directory each."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability_lab.command_line import ROOT, CommandLine, plugin_installed, read_command_line
from stability_lab.compose import Composed, checked, compose_jobs
from stability_lab.config import ConfigError, config_dir
from stability_lab.config.words import quoted
from stability_lab.machine.cores import cores
from stability_lab.plugins.instantiate import typed_options
from stability_lab.plugins.trust import allowed, allowing
from stability_lab.run import console
from stability_lab.run.folder import SUMMARY, InUse, is_finished, make_folder, read_object, sweep_name
from stability_lab.run.signals import CTRL_C, EXIT_CODES, SIGTERM, Terminated
from stability_lab.run.sweep import IN_USE, Journal, at_work, deaf, finish, follow, new_journal, stoppable, told
from stability_lab.text import next_command, shown
from stability_lab.tracking.manifest import fingerprint
from stability_lab.training.launched import check_ranks, launched

if TYPE_CHECKING:
    from stability_lab.run.job import Outcome

_log = logging.getLogger("stability_lab")


def main(argv: Sequence[str], ends: bool = True) -> int:
    """Run the command and return its exit code. ConfigError before anything is created.

    `ends`: what may be run next is said at the end; a command that trains has more to do.
    """
    place = launched()
    command = read_command_line(argv)
    if command.only_shows:
        _check_composition(command)
        return _run_hydra(command, [])
    if command.multirun:
        _launcher(command)  # Hydra itself would say only that it cannot find it
    composed = compose_jobs(command)
    for job in composed:
        check_ranks(job.config, place, command.multirun)
    from stability_lab.data.tokens.memmap import cache_dir

    # Else torch makes a folder in /tmp; what it has compiled is worth keeping for the next run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    resumed = next((job for job in composed if job.config.resume is not None), None)
    if resumed is not None:
        composed = [_of_the_run(command, resumed)]
    from stability_lab.build import check
    from stability_lab.run.compiling import settled

    if command.multirun:
        from stability_lab.run.workers import of_a_sweep

        composed = of_a_sweep(composed)
    check((settled(job).config for job in composed), must_fit=True)
    if any(job.config.trainer.deterministic for job in composed):
        # cuBLAS reads it once, at the first product of the process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not command.multirun:
        hydras = command.flags or any(line.lstrip("+~").startswith("hydra") for line in command.overrides)
        if resumed is None and place.size == 1 and hydras:
            # What Hydra does around a job, where somebody asks for it; else the job is composed already.
            return _run_hydra(command, [])
        return _run(composed[0], command.overrides, None if resumed is None else resumed.config.resume)
    code, folder = _sweep(command, composed)
    if ends and code in (EXIT_CODES[CTRL_C], EXIT_CODES[SIGTERM]):
        packages = (word for package in allowed() for word in ("--allow", package))
        _log.info("to go on: %s", shlex.join(["python", "-m", "stability_lab", "train", *packages, *argv]))
    elif ends:
        _say_next(folder)
    return code


def _run(job: Composed, overrides: Sequence[str], resume: str | None) -> int:
    """The run of this process, or this process's part of a run of several."""
    from stability_lab.build import device_of
    from stability_lab.run.follower import follow
    from stability_lab.run.job import execute, go_on_with
    from stability_lab.training.ranks import ranks_of

    with ranks_of(job.config.trainer.parallel, device_of(job.config)) as ranks:
        if ranks.rank > 0:
            return follow(job, ranks)
        if resume is not None:
            return _ended(go_on_with(Path(resume), job, overrides, sys.argv, ranks))
        return _ended(execute(job, overrides, sys.argv, ranks=ranks))


def _ended(outcome: Outcome) -> int:
    _say_next(outcome.path.parent, outcome.path)
    return outcome.exit_code


def _say_next(folder: Path, run: Path | None = None) -> None:
    """Runs in `folder` that have a result are compared, and one alone is scored. Unless `run` has none: its last words
    say how it goes on."""
    if run is None or _has_result(run):
        ended = list(itertools.islice(filter(_has_result, sorted(folder.iterdir())), 2))
        if len(ended) == 2:
            _log.info("%s", next_command("compare", str(folder)))
        elif ended:
            _log.info("%s", next_command("score", str(ended[0])))


def _has_result(run: Path) -> bool:
    return (run / SUMMARY).is_file() and is_finished(read_object(run / SUMMARY))


def _of_the_run(command: CommandLine, asked: Composed) -> Composed:
    """Return the configuration for `resume=RUN`: the run's own, with what else the command asks for."""
    from stability_lab.run.compiling import settled
    from stability_lab.run.resume import read_config, with_overrides

    run = asked.config.resume or ""
    if command.multirun:
        raise ConfigError(f"resume={run}: goes without -m; a sweep goes on with what is unfinished by its own command")
    if asked.config.if_exists is not None:
        raise ConfigError(f"if_exists={asked.config.if_exists}: has no meaning beside resume={run}; leave one out")
    return settled(with_overrides(read_config(Path(run)), asked, command.jobs[0]), Path(run))


def _check_composition(command: CommandLine) -> None:
    """`--cfg job` shows what was asked for, or says what is wrong with it; `--help` needs no check but for a folder
    of configs, which may say what Hydra is to import."""
    if {"--cfg", "-c", "--config-dir", "-cd"} & {flag.partition("=")[0] for flag in command.flags}:
        compose_jobs(command)


def _run_hydra(command: CommandLine, extra: list[str], journal: Journal | None = None) -> int:
    import hydra

    argv = sys.argv
    sys.argv = ["stability_lab train", *command.flags, *command.overrides, *extra]
    outcomes: list[int] = []
    refused: list[ConfigError] = []

    def task(cfg: Any) -> int:
        if journal is not None:
            return _job_of_sweep(cfg, argv, journal)
        from stability_lab.run.job import execute  # it loads torch, which --help does without

        try:
            outcomes.append(_ended(execute(checked(cfg), _task_words(), argv)))
        except ConfigError as error:
            refused.append(error)  # Hydra would print a traceback
            return 2
        return outcomes[-1]

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=ROOT)(task)()
    finally:
        sys.argv = argv
    if refused:
        raise refused[0]
    return outcomes[-1] if outcomes else 0


def _task_words() -> list[str]:
    """The words of the job that Hydra runs now."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task)


def _job_of_sweep(cfg: Any, argv: Sequence[str], journal: Journal) -> int:
    """One job, in the first process or in another one. It never raises for a run that fails."""
    from hydra.core.hydra_config import HydraConfig

    from stability_lab.run.job import execute

    hydra_config = HydraConfig.get()
    number, workers = int(hydra_config.job.num) + 1, _workers(hydra_config, journal.total)
    if os.getpid() != journal.pid:
        from stability_lab.build import share_threads

        os.chdir(journal.cwd)
        console.set_up_worker()
        deaf()
        follow(journal.pid)
        share_threads(workers)
    if journal.only is not None and number not in journal.only:
        return 0
    if (why := journal.stopped()) is not None:
        _log.debug("job %d does not start: %s", number, why)
        return 0
    journal.started(number, workers)
    if os.getpid() != journal.pid:
        from stability_lab.run.workers import take_device

        take_device(journal.worker())
    started = time.time()
    try:
        with allowing(journal.allowed), at_work():
            outcome: Mapping[str, Any] = execute(checked(cfg), _task_words(), argv, number, journal.swept)._asdict()
    except InUse as error:  # another start of this sweep trains it
        outcome = {"path": error.path, "status": IN_USE, "reason": str(error), "exit_code": 0}
    except ConfigError as error:
        _log.error("job %d: error: %s", number, error)
        outcome = {"path": None, "status": "failed", "reason": str(error), "exit_code": 2}
    except Exception as error:  # outside the run, which looks after its own
        reason = f"an error that nothing here expects, {type(error).__name__}({shown(str(error))[:200]})"
        _log.error("job %d failed: %s; the same command tries it again", number, reason)
        _log.debug("traceback", exc_info=error)
        outcome = {"path": None, "status": "failed", "reason": reason, "exit_code": 1}
    journal.ended(number, {**outcome, "seconds": time.time() - started})
    return outcome["exit_code"]


def _workers(hydra_config: Any, jobs: int) -> int:
    """The number of processes in which Hydra's launcher runs jobs at once, as far as its configuration says."""
    launcher = hydra_config.launcher
    target = str(launcher.get("_target_", ""))
    if "joblib" in target:
        asked = int(launcher.get("n_jobs") or 1)
        return min(jobs, asked if asked > 0 else max(1, cores() + 1 + asked))
    if "submitit" in target and "Local" in target:
        return jobs
    return 1


def _sweep(command: CommandLine, composed: list[Composed]) -> tuple[int, Path]:
    """The exit code, and the folder of the runs."""
    from stability_lab.run.workers import words_of, workers_of

    first, named = composed[0].config, _launcher(command)
    words = words_of(composed, named)
    launcher = named or ("joblib" if "hydra/launcher=joblib" in words else "basic")
    # Without the version of the code: the command of yesterday goes on in the folder of yesterday.
    group = first.group or sweep_name(command.swept, (fingerprint(typed_options(job.plain), "") for job in composed))
    folder = Path(first.output_dir) / group
    make_folder(folder)
    journal = new_journal(folder, len(composed), tuple(command.swept), first.sweep.fail_fast, launcher != "basic")
    workers = workers_of(composed)
    by = f", by {named}" if named else f", {workers} at once" if workers > 1 else ""
    _log.info("sweep of %s in %s%s", "1 run" if len(composed) == 1 else f"{len(composed)} runs", folder, by)
    words += [f"++group={quoted(group)}", f"hydra.sweep.dir={quoted(str(folder))}"]
    with console.sweep(), told(journal):
        code = _rounds(command, words, journal) if launcher == "joblib" else _round(command, words, journal)
    return finish(journal, sys.argv, command.jobs, first.sweep.strict, code), folder


def _round(command: CommandLine, words: list[str], journal: Journal) -> int:
    """Let Hydra run the jobs; the exit code is that of an interruption, or 1 where the launcher gave up."""
    try:
        with stoppable(journal):
            _run_hydra(command, words, journal)
    except KeyboardInterrupt:
        return EXIT_CODES[CTRL_C]
    except Terminated:
        return EXIT_CODES[SIGTERM]
    except SystemExit:  # Hydra has said what it was
        return 1
    except Exception as error:  # a worker that was killed takes its launcher down, and not what the others have done
        _log.warning(
            "a worker ended before its job (%s), as where memory runs out; sweep.workers=1 trains one job at a time",
            type(error).__name__,
        )
        _log.debug("traceback", exc_info=error)
        return 1
    return 0


def _rounds(command: CommandLine, words: list[str], journal: Journal) -> int:
    """A worker that is killed, as where memory runs out, takes the others with it. So each job that was running is
    started once more, alone, and then the rest together."""
    alone: set[int] = set()
    only: tuple[int, ...] | None = None
    while True:
        known = len(journal.records())
        code = _round(command, words, replace(journal, only=only))
        if code > 1 or journal.stopped() is not None or len(journal.records()) == known:
            return code
        lost, jobs = set(journal.running()), set(range(1, journal.total + 1))
        only = tuple(sorted(lost - alone)[:1])
        for job in only:
            _log.warning("job %d lost its process: it is started once more, alone", job)
        alone.update(only)
        only = only or tuple(jobs - set(journal.results()) - alone)
        if not only:
            return 0


def _launcher(command: CommandLine) -> str | None:
    """The launcher that the command names; ConfigError where its package is missing, for Hydra gives a traceback."""
    name = None
    for line in command.overrides:
        if line.lstrip("+").startswith("hydra/launcher="):
            name = line.partition("=")[2]
    if name is not None and name.startswith("submitit") and not plugin_installed("hydra_submitit_launcher"):
        raise ConfigError(f"hydra/launcher={name}: needs a package; pip install 'stability-lab[sweep]'")
    return name
