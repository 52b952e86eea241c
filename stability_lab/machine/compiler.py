"""Whether torch.compile finds here what it compiles with."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys


def missing_compiler(device_type: str) -> str | None:
    """What is not here and torch.compile needs, or None. It looks in the same places as torch."""
    if device_type == "cuda":
        return "no Triton" if importlib.util.find_spec("triton") is None else None
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    absent = shutil.which(name) is None and "TORCH_INDUCTOR_INSTALL_GXX" not in os.environ
    return f"no {name}" if absent else None
