"""Peak memory of training: one number, measured the same way by a run and by the plan that predicts it.

On CUDA it is the most that torch's allocator held on the device. On a CPU it is the process's peak resident memory:
weights, gradients, optimizer state and activations, and also the interpreter, its libraries and the mapped pages of
the corpus that were read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start a new measurement; what earlier runs of this process left behind is freed first where that is possible.

    Where the system cannot reset it (any but Linux), `peak_bytes` is the peak since the process started.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text("5")


def physical_bytes(device: torch.device) -> int | None:
    """Memory of the device, or of the machine for a CPU; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def peak_bytes(device: torch.device) -> int | None:
    """Peak since `reset_peak`; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None
