"""Fixtures of all tests: nothing reaches the network or the user's cache, and runs are tiny but composed from
the real configuration."""

import contextlib
import functools
import io
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stability_lab.command_line import read_command_line
from stability_lab.compose import compose_jobs
from stability_lab.config import TrainConfig

# Before anything imports torch: more threads slow tensors of this size down. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TINY = (
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.seq_len=16",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=5",
    "trainer.eval_sequences=8",
    "trainer.device=cpu",
    "diagnostics.probe_sequences=2",
    "schedule.warmup_steps=2",
    "optimizer.lr=1e-2",
    "tracking=local",
)

ComposeConfig = Callable[..., TrainConfig]


@functools.cache
def _compose(*overrides: str) -> TrainConfig:
    (job,) = compose_jobs(read_command_line(overrides))
    return job.config


@pytest.fixture
def in_the_foreground() -> Iterator[None]:
    """Ctrl-C counts, here and in child processes: a shell starts its background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _apart_from_the_user() -> Iterator[None]:
    """Caches of their own, no W&B account and no network."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="stability-lab-tests-") as cache,
    ):
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.delenv("COLUMNS", raising=False)  # tables are whole, as in a file
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("STABILITY_LAB_CACHE", cache)
        patch.setenv("HF_HOME", os.path.join(cache, "huggingface"))
        yield


@pytest.fixture(scope="session")
def compose_config() -> ComposeConfig:
    """`compose_config(*overrides)`: the checked configuration of `train OVERRIDES`; do not change it."""
    return _compose


@pytest.fixture(scope="session")
def tiny_config() -> ComposeConfig:
    """`tiny_config(*overrides)`: as `compose_config`, two layers of width 32; later overrides win."""
    return lambda *overrides: _compose(*TINY, *overrides)


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """The same as words for a command line."""
    return TINY


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, empty and its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_logger() -> Iterator[None]:
    """Commands set the package's logger up, with a stream that ends with their test; no test sees another's."""
    log = logging.getLogger("stability_lab")
    log.handlers, log.level, log.propagate = [], logging.NOTSET, True
    yield
    log.handlers, log.level, log.propagate = [], logging.NOTSET, True


class Shown(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Shown]:
    """`run_command(*words)`: exit code and output of the command line, run in this process."""
    from stability_lab import cli

    def run(*words: str) -> Shown:
        out, err = io.StringIO(), io.StringIO()
        log = logging.getLogger("stability_lab")
        before = log.handlers, log.level, log.propagate
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.run(words)
        finally:
            log.handlers, log.level, log.propagate = before
        return Shown(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def tiny_run(tiny_config):
    """`tiny_run(*overrides)`: a freshly built `Run` of `tiny_config(*overrides)`."""
    from stability_lab.build import build_run

    return lambda *overrides: build_run(tiny_config(*overrides))


@pytest.fixture(scope="session")
def train_steps():
    """`train_steps(run, n)`: the rows of the run's first n steps, as dicts of floats."""
    import torch

    def train(run, n: int) -> list[dict[str, float]]:
        size = run.config.trainer.micro_batch_size * run.config.trainer.grad_accum_steps
        rows = []
        for step in range(1, n + 1):
            windows = torch.from_numpy(run.sampler.batch((step - 1) * size, size))
            batch = run.objective.batch(windows, 0)
            rows.append(dict(zip(run.step.columns, run.step(batch, run.schedule.lr(step)).tolist(), strict=True)))
        return rows

    return train


class Server:
    """On a port of its own, it answers every request as it is told: with a status, by hanging up or not at all."""

    def __init__(self, answer: int | str) -> None:
        self.requests: list[str] = []
        self._answer = answer
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._open.append(connection)
            if self._answer == "silence":
                continue
            self.requests.append(connection.recv(4096).decode().splitlines()[0])
            if self._answer != "close":
                connection.sendall(f"HTTP/1.1 {self._answer} x\r\nContent-Length: 0\r\n\r\n".encode())
            connection.close()

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for connection in self._open:
            connection.close()


@pytest.fixture(scope="session")
def server() -> type[Server]:
    """`with server(answer) as one`: a host that gives this answer to all who ask at `one.url`."""
    return Server
