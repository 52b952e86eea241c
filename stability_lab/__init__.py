"""Which stabilizer does my language model need, what does it cost, and how sure can I be?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stability_lab.monitoring.monitor import Monitor

__version__ = "0.1.0"
__all__ = ["Monitor", "__version__"]


def __getattr__(name: str) -> Any:
    # Monitor needs torch, and `--help` and the offline tools must not wait for that.
    if name == "Monitor":
        from stability_lab.monitoring.monitor import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
