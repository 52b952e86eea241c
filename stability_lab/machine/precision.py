"""Whether a CPU has instructions for a precision."""

from __future__ import annotations

import platform

import torch


def has_bf16() -> bool:
    """False for an x86 processor without AVX512-BF16 and AMX, where bf16 is emulated; other kinds are not asked."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
