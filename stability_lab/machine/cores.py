"""How many processor cores there are to use."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may use; on macOS, which keeps no such list, all that the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
