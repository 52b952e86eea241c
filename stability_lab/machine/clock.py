"""How much of a machine a process gets: seconds of the clock and of its threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# A process alone on its cores gets nearly all: threads that wait for each other spin, which counts as work.
BUSY_SHARE = 0.75


class Clock:
    """Sums the seconds that pass inside `running`: of the clock, and of all CPU threads of this process."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - wall
            self.cpu_s += time.process_time() - cpu

    def __iadd__(self, other: Clock) -> Clock:
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        return self

    def share(self, threads: int) -> float:
        """The part that this process got of what `threads` could have computed."""
        return self.cpu_s / max(threads * self.wall_s, 1e-9)


def busy(share: float, threads: int) -> str | None:
    """A notice where other work takes a part of the cores from a run with several threads."""
    if threads < 2 or share >= BUSY_SHARE:
        return None
    return (
        f"{threads} threads got {share:.0%} of the time that they could have used: they wait for each other beside "
        "other work on this machine, where trainer.threads=1 is often faster"
    )
