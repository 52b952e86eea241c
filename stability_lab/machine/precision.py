"""What a precision means, and whether a CPU has instructions for it."""

from __future__ import annotations

import platform

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: str) -> torch.dtype:
    """Of weights, gradients and optimizer state: fp32, and fp64 in a run that is to show what rounding does."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, AUTOCAST.get(precision, torch.float32), enabled=precision in AUTOCAST)


def has_bf16() -> bool:
    """False for an x86 processor without AVX512-BF16 and AMX, where bf16 is emulated; other kinds are not asked."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
