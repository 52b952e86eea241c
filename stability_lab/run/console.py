"""What reaches the terminal: all messages of one run, of a sweep only what concerns the whole of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from stability_lab.text import printable

_ALL = logging.getLogger("stability_lab")
_SWEEP = "stability_lab.run.sweep"


class _AboveTheBar(logging.StreamHandler[TextIO]):
    """A line that is written beside a progress bar would be glued to it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # not at the top, where `--help` would wait for it

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Printable(logging.Formatter):
    """A run's name, and what its files say, may hold control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Filter(logging.Filter):
    """`only_file` of a record keeps it from the terminal; `in_sweep` lets one of a job through."""

    sweep = False

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "only_file", False):
            return False
        if not self.sweep or record.levelno >= logging.WARNING:
            return True
        return record.name == _SWEEP or getattr(record, "in_sweep", False)


_filter = _Filter()


def set_up() -> None:
    """Messages for people go to standard output; details stay in a run's train.log."""
    handler = _AboveTheBar(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(_Printable("%(message)s"))
    handler.addFilter(_filter)
    _ALL.handlers = [handler]
    _ALL.setLevel(logging.DEBUG)
    _ALL.propagate = False


@contextmanager
def sweep() -> Iterator[None]:
    """Keep jobs quiet inside: their steps and last words are in their own logs."""
    before = _filter.sweep
    _filter.sweep = True
    try:
        yield
    finally:
        _filter.sweep = before


@contextmanager
def quiet() -> Iterator[None]:
    """Let only warnings through inside: a command that trains many small sweeps says itself what came out."""
    handlers = {handler: handler.level for handler in _ALL.handlers}
    for handler in handlers:
        handler.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for handler, level in handlers.items():
            handler.setLevel(level)


def set_up_worker() -> None:
    """Keep a process that works for a sweep quiet: the first one reports what became of its jobs."""
    _ALL.handlers = [logging.NullHandler()]
    _ALL.setLevel(logging.DEBUG)
    _ALL.propagate = False
    os.environ["TQDM_DISABLE"] = "1"
