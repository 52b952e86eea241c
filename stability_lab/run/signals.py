"""Ctrl-C and SIGTERM: once ends a run after its step and with a checkpoint, twice ends it at once.

SIGUSR1 and SIGUSR2, with which Slurm warns a job of its end (`--signal`), and SIGHUP of a closed terminal count as
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

CTRL_C, SIGTERM = "Ctrl-C", "SIGTERM"
_AS_SIGTERM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
EXIT_CODES = {CTRL_C: 130} | {number.name: 143 for number in _AS_SIGTERM}
_ours: list[Any] = []  # handlers that are set, the innermost last


def reason_of(number: int) -> str:
    """What people call a signal."""
    return signal.Signals(number).name if number in _AS_SIGTERM else CTRL_C


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handler` for all of these signals; only in the main thread.

    A signal that is ignored stays so, as Ctrl-C in a background job and SIGHUP under nohup, and one that somebody else
    handles, as a launcher for Slurm does to queue its job again; but not SIGTERM.
    """
    previous: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, *_AS_SIGTERM)}
    for number, before in previous.items():
        free = before is not signal.SIG_IGN if number == signal.SIGINT else before in (signal.SIG_DFL, *_ours)
        if free or number == signal.SIGTERM:
            signal.signal(number, handler)
    _ours.append(handler)
    try:
        yield
    finally:
        _ours.pop()
        for number, before in previous.items():
            signal.signal(number, before)


class Terminated(BaseException):
    """SIGTERM, as an exception, so that it ends a run the way Ctrl-C does."""


class Interruption:
    """Signal handler of one run. `reason` is the newest signal that came; `can_wait`: the loop asks for it.

    `patient`: no signal ends the run at once, for a launcher sends several, and ends by itself what takes too long.
    """

    told = False  # of a process that works for another, which has said it

    def __init__(self) -> None:
        self.reason: str | None = None
        self.can_wait = self.patient = False

    def asked(self) -> bool:
        return self.reason is not None

    def __call__(self, number: int, _: FrameType | None) -> None:
        first = self.reason is None
        self.reason = reason_of(number)
        if not (self.patient or (first and self.can_wait)):
            raise KeyboardInterrupt if self.reason == CTRL_C else Terminated
        if self.told or not first:
            return
        # The logger may be in the middle of a line that this call has interrupted.
        with suppress(OSError):
            os.write(1, f"\n{self.reason}: finishing this step and a checkpoint; again stops at once\n".encode())


@contextmanager
def interruption() -> Iterator[Interruption]:
    """An `Interruption` as the handler of these signals; outside the main thread one that nothing calls."""
    handler = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    with handled(handler):
        yield handler
