"""What the jobs of a sweep tell each other and the person who waits: a journal on disk, one line a job, the table.

Jobs may run in any number of processes (Hydra's launchers joblib and submitit), so nothing is kept in memory alone:
each job appends a line to `jobs.jsonl` when it starts and one when it ends. The process that was started by hand reads
them for the table and for `sweep.json`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from stability_lab.disk.files import open_file, read_text, replace_file
from stability_lab.plugins.trust import allowed
from stability_lab.run.signals import CTRL_C, EXIT_CODES, SIGTERM, Interruption, Terminated, handled, reason_of
from stability_lab.text import MISSING, Table, duration, room, text_table
from stability_lab.tracking.manifest import redact

JOBS, RESULT = "jobs.jsonl", "sweep.json"
NOT_RUN, IN_USE = "not run", "in use"
_LOOK_EVERY_S = 0.3
_log = logging.getLogger("stability_lab.run.sweep")


@dataclass(frozen=True)
class Journal:
    """One start of a sweep, from process `pid`. It is sent to others, so that it holds nothing but values.

    `fail_fast`: no further job starts after one that failed. `parallel`: jobs may run in other processes.
    """

    folder: Path
    launch: str
    pid: int
    total: int
    swept: tuple[str, ...]  # keys
    fail_fast: bool
    parallel: bool
    allowed: tuple[str, ...]  # packages whose classes a worker may import
    cwd: str  # where relative paths begin; workers of an earlier sweep may be elsewhere
    only: tuple[int, ...] | None = None  # the jobs that may start; None: all

    def started(self, job: int, workers: int) -> None:
        process = {"pid": os.getpid(), "host": socket.gethostname(), "workers": workers}
        self._append({"job": job, "event": "started", **process})

    def ended(self, job: int, outcome: Mapping[str, Any]) -> None:
        self._append({"job": job, "event": "ended", **outcome})

    def stop(self, reason: str) -> None:
        """No further job starts."""
        self._append({"event": "stop", "reason": reason})

    def records(self) -> list[dict[str, Any]]:
        """The journal of this start of the sweep; half a line, left by a full disk, does not count."""
        found = []
        with suppress(OSError):
            for line in read_text(self.folder / JOBS).splitlines():
                with suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and record.get("launch") == self.launch:
                        found.append(record)
        return found

    def results(self) -> dict[int, dict[str, Any]]:
        return {record["job"]: record for record in self.records() if record.get("event") == "ended"}

    def running(self) -> dict[int, int]:
        """Job -> process, of those on this machine that have started and not ended."""
        here = [record for record in self.records() if record.get("host") == socket.gethostname()]
        started = {record["job"]: record["pid"] for record in here if record.get("event") == "started"}
        ended = self.results()
        return {job: pid for job, pid in started.items() if job not in ended}

    def worker(self) -> int:
        """The number of this process among those on this machine that have started a job."""
        here = [record for record in self.records() if record.get("host") == socket.gethostname()]
        return list(dict.fromkeys(record["pid"] for record in here)).index(os.getpid())

    def stopped(self) -> str | None:
        """Why no further job may start."""
        for record in self.records():
            if record.get("event") == "stop":
                return f"the sweep was stopped by {record['reason']}"
            if record.get("status") == "interrupted":
                return f"job {record['job']} was interrupted"
            if self.fail_fast and record.get("status") == "failed":
                return f"job {record['job']} failed, and sweep.fail_fast=true"
        return None

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({"launch": self.launch, "time": _now(), **record}, default=str)
        try:
            # One write, so that lines of several processes do not mix; the first newline ends a line that was cut off.
            with open_file(self.folder / JOBS, "ab") as file:
                file.write(b"\n" * (file.tell() > 0) + line.encode())
        except OSError as error:
            _log.error("%s cannot be written: %s", self.folder / JOBS, error.strerror)


def new_journal(folder: Path, total: int, swept: tuple[str, ...], fail_fast: bool, parallel: bool) -> Journal:
    launch = secrets.token_hex(4)
    return Journal(folder, launch, os.getpid(), total, swept, fail_fast, parallel, allowed(), os.getcwd())


@contextmanager
def beside(watch: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `watch` in a thread meanwhile; its event is set at the end, and waits for it to return."""
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(over,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def told(journal: Journal) -> Iterator[None]:
    """Report each job that ends meanwhile in one line, whichever process it ran in."""

    def watch(over: threading.Event) -> None:
        known: set[int] = set()
        while True:
            last = over.wait(_LOOK_EVERY_S)
            for n in journal.results():
                if n not in known:
                    known.add(n)
                    _log.info("%s", _line(journal, n, len(known)))
            if last:
                return

    with beside(watch):
        yield


def _line(journal: Journal, job: int, done: int) -> str:
    """What became of a job, how many are left, and how long they will take."""
    records = journal.records()
    results = {record["job"]: record for record in records if record.get("event") == "ended"}
    workers = max((record.get("workers", 1) for record in records), default=1)
    left, record = journal.total - done, results[job]
    trained = [r["seconds"] for r in results.values() if not r.get("skipped") and r["status"] != IN_USE]
    words = [record["status"], *([record["verdict"]] if record.get("verdict") else [])]
    if record.get("val_loss") is not None:
        words.append(f"val/loss {record['val_loss']:.4f}")
    if record["status"] in ("failed", IN_USE) and record.get("reason"):
        words.append(str(record["reason"]))
    if record["status"] != IN_USE:
        words.append("already there" if record.get("skipped") else duration(record["seconds"]))
    eta = ""
    if journal.stopped() is not None:
        return f"[{done} of {journal.total}] {_name(record)}: {', '.join(words)}; no further job starts"
    if left and trained:
        eta = f", about {duration(sum(trained) / len(trained) * left / min(workers, left))}"
    return f"[{done} of {journal.total}] {_name(record)}: {', '.join(words)}; {left} to go{eta}"


def finish(journal: Journal, argv: Sequence[str], overrides: Sequence[Sequence[str]], strict: bool, code: int) -> int:
    """Print the table, write sweep.json, and return the exit code: 1 for a failed job, 3 for a diverged one if
    `strict`, else `code`, that of an interruption. A job that another start of the sweep trains is no failure."""
    results, running, stopped = journal.results(), journal.running(), journal.stopped() is not None
    jobs: list[dict[str, Any]] = [
        {"job": n, "overrides": _swept(words, journal.swept), **_result(results.get(n), n in running, stopped)}
        for n, words in enumerate(overrides, start=1)
    ]
    counts = Counter(job["status"] for job in jobs)
    signals = [record["reason"] for record in journal.records() if record.get("event") == "stop"]
    interrupted = [job["exit_code"] for job in jobs if job["status"] == "interrupted"]
    if signals:  # of a job in another process the end is always by SIGTERM
        code = EXIT_CODES[signals[0]]
    elif interrupted:
        code = max(interrupted)
    if not code and counts["failed"] + counts[NOT_RUN]:
        code = 1
    if not code and strict and counts["diverged"]:
        code = 3
    _log.info("%s", text_table(_table(jobs, counts), room()))
    for job in jobs:
        if job["status"] == "failed":
            where = f" (traceback in {job['path']}/train.log)" if job.get("path") else ""
            _log.info("job %d failed: %s%s", job["job"], job.get("reason") or "no reason is known", where)
    content = {
        "command": redact(list(argv)),
        "finished": _now(),
        "exit_code": code,
        "counts": dict(counts),
        "jobs": jobs,
    }
    target = journal.folder / RESULT
    try:
        replace_file(target, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        _log.error("%s could not be written: %s", target, error.strerror)
        code = code or 1
    return code


def _swept(overrides: Sequence[str], keys: Sequence[str]) -> list[str]:
    return [line.lstrip("+") for line in overrides if line.lstrip("+~").partition("=")[0] in keys]


def _result(record: Mapping[str, Any] | None, was_started: bool, stopped: bool) -> dict[str, Any]:
    if record is not None:
        return {key: value for key, value in record.items() if key not in ("launch", "time", "event", "job")}
    if not was_started:
        return {"status": NOT_RUN, "exit_code": None}
    if stopped:
        return {"status": "interrupted", "exit_code": EXIT_CODES[CTRL_C], "reason": "stopped at once"}
    return {"status": "failed", "exit_code": 1, "reason": "its process ended without a word, as when memory runs out"}


def _table(jobs: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> Table:
    rows = []
    for job in jobs:
        loss = MISSING if job.get("val_loss") is None else f"{job['val_loss']:.4f}"
        timed = "seconds" in job and job["status"] != IN_USE
        taken = "already there" if job.get("skipped") else duration(job["seconds"]) if timed else MISSING
        rows.append((str(job["job"]), job["status"], job.get("verdict") or MISSING, loss, taken, _name(job)))
    title = f"{len(jobs)} {'run' if len(jobs) == 1 else 'runs'}: " + ", ".join(f"{n} {s}" for s, n in counts.items())
    return Table(title, ("job", "status", "verdict", "val/loss", "time", "run"), tuple(rows))


def _name(record: Mapping[str, Any]) -> str:
    return Path(str(record["path"])).name if record.get("path") else " ".join(record.get("overrides", ())) or "-"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def stoppable(journal: Journal) -> Iterator[None]:
    """Ctrl-C and SIGTERM of a whole sweep: no further job starts, and those that run write a checkpoint.

    A job in this process looks after itself while it runs. Jobs in other processes do not hear the terminal (see
    `deaf`): they are sent SIGTERM, and once more for each further signal, which ends them at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        reason = reason_of(number)
        journal.stop(reason)
        if not journal.parallel:
            raise KeyboardInterrupt if reason == CTRL_C else Terminated
        for pid in journal.running().values():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        with suppress(OSError):
            os.write(1, f"\n{reason}: the running jobs finish their step and a checkpoint; again stops them\n".encode())

    with handled(stop):
        yield


_at_work = threading.Event()


@contextmanager
def at_work() -> Iterator[None]:
    """A worker of a sweep trains a job inside; see `follow`."""
    _at_work.set()
    try:
        yield
    finally:
        _at_work.clear()


@cache
def follow(parent: int) -> None:
    """End this worker when the process `parent` that started it is gone: a job that runs ends as by SIGTERM."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        if _at_work.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        while _at_work.is_set():
            time.sleep(_LOOK_EVERY_S)
        os._exit(EXIT_CODES[SIGTERM])

    if os.getppid() == parent:
        threading.Thread(target=watch, daemon=True).start()


def deaf() -> None:
    """Ignore Ctrl-C in a worker of a sweep: it reaches the whole terminal, and the first process passes it on."""
    Interruption.told = True
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
