"""Ctrl-C and SIGTERM: once ends a run after its step and with a checkpoint, twice ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

CTRL_C, SIGTERM = "Ctrl-C", "SIGTERM"
EXIT_CODES = {CTRL_C: 130, SIGTERM: 143}


class Terminated(BaseException):
    """SIGTERM, as an exception, so that it ends a run the way Ctrl-C does."""


class Interruption:
    """Signal handler of one run. `reason` is the newest signal that came; `can_wait`: the loop asks for it."""

    told = False  # of a process that works for another, which has said it

    def __init__(self) -> None:
        self.reason: str | None = None
        self.can_wait = False

    def asked(self) -> bool:
        return self.reason is not None

    def __call__(self, number: int, _: FrameType | None) -> None:
        first = self.reason is None
        self.reason = SIGTERM if number == signal.SIGTERM else CTRL_C
        if not (first and self.can_wait):
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self.told:
            return
        # The logger may be in the middle of a line that this call has interrupted.
        with suppress(OSError):
            os.write(1, f"\n{self.reason}: finishing this step and a checkpoint; again stops at once\n".encode())


@contextmanager
def interruption() -> Iterator[Interruption]:
    """An `Interruption` as the handler of both signals; outside the main thread one that nothing calls."""
    handler = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    previous: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for number, before in previous.items():
        if number == signal.SIGTERM or before is not signal.SIG_IGN:  # a background job ignores Ctrl-C
            signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
