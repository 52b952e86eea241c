"""Which attention kernel a run takes: chosen once, before the model is built.

`sdpa` is torch's fused kernel; `sdpa_fp32` gives it fp32 under autocast too. `explicit` forms the logits in fp32, a
block of queries at a time: the reference for tests, the path of the probe (fused kernels do not give the logits away)
and, on CPU, that of stabilizers that act on single logits. `flex` is compiled FlexAttention on CUDA.
"""

from __future__ import annotations

from typing import NamedTuple

from stability_lab.config import ConfigError
from stability_lab.seams import Seams

FLEX_MIN_HEAD_DIM = 16  # of its kernel
FP32_TOKENS = 256  # up to here SDPA takes less time in fp32 than in bf16 on a CPU (docs/performance.md)


class Backend(NamedTuple):
    name: str
    reason: str


def choose_backend(
    requested: str,
    seams: Seams,
    device_type: str = "cpu",
    precision: str = "fp32",
    dropout: float = 0.0,
    head_dim: int = 64,
    masked_by: str | None = None,
    fp16_scores: bool = False,
    seq_len: int = FP32_TOKENS + 1,
) -> Backend:
    """The back-end of every layer and why; both go to the log and the manifest.

    `masked_by`: the config key that hides more than the future, where one does. `fp16_scores`: logits are formed in
    fp16 whatever the precision (`model.rounding.scores`). ConfigError where what was asked for cannot honour a
    stabilizer: none is ever dropped.
    """
    for_logits = seams.owners.get("score_mod", ())
    restored = seams.owners.get("score_restore", ())
    if restored or fp16_scores:
        if precision != "fp16" and not fp16_scores:
            raise ConfigError(
                f"trainer.precision={precision}: stabilizer {restored[0]} restores logits that were formed in fp16, "
                f"and in another precision it changes only rounding; use trainer.precision=fp16, or leave it out"
            )
        former = f"stabilizer {restored[0]}" if restored else "model.rounding.scores=fp16"
        if requested not in ("auto", "explicit"):
            raise ConfigError(
                f"model.attention={requested}: {former} forms logits in fp16 and needs explicit logits; use "
                f"model.attention=auto"
            )
        return Backend("explicit", f"{former.removeprefix('stabilizer ')} forms logits in fp16")
    if requested == "flex" and device_type == "cpu":
        raise ConfigError(
            "model.attention=flex: FlexAttention has no backward pass on CPU; use auto, sdpa or explicit there"
        )
    unfit = ""
    if dropout:
        unfit = f"FlexAttention has no dropout (model.dropout={dropout:g})"
    elif head_dim < FLEX_MIN_HEAD_DIM:
        unfit = f"FlexAttention needs a head_dim of {FLEX_MIN_HEAD_DIM} or more (here {head_dim})"
    elif precision == "fp64":
        unfit = "FlexAttention has no fp64 (trainer.precision=fp64)"
    if requested == "flex" and unfit:
        raise ConfigError(f"model.attention=flex: {unfit}; use model.attention=auto")
    if requested in ("sdpa", "sdpa_fp32") and for_logits:
        raise ConfigError(
            f"model.attention={requested}: fused attention cannot apply stabilizer {for_logits[0]}; use "
            "model.attention=auto"
        )
    if requested == "sdpa_fp32" and precision in ("fp32", "fp64"):
        raise ConfigError(
            f"model.attention=sdpa_fp32: is for bf16 and fp16; use sdpa with trainer.precision={precision}"
        )
    if requested != "auto":
        return Backend(requested, f"model.attention={requested}")
    if masked_by and not for_logits and device_type == "cuda" and not unfit:
        return Backend("flex", f"{masked_by}: it skips what is hidden")
    if not for_logits and device_type == "cpu" and precision == "bf16" and seq_len <= FP32_TOKENS:
        return Backend(
            "sdpa_fp32",
            f"no stabilizer acts on single attention logits, and up to {FP32_TOKENS} tokens "
            "a CPU forms them faster in fp32",
        )
    if not for_logits:
        return Backend("sdpa", "no stabilizer acts on single attention logits")
    if device_type == "cuda" and unfit:
        return Backend("explicit", f"{for_logits[0]} acts on single attention logits, and {unfit}")
    if device_type == "cuda":
        return Backend("flex", f"{for_logits[0]} acts on single attention logits, which no other fused kernel allows")
    return Backend("explicit", f"{for_logits[0]} acts on single attention logits, and there is no fused kernel on CPU")
