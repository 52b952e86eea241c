"""One word on a finished run, with a sentence that says why and what to try."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

VerdictName = Literal["diverged", "no_learning", "spiky", "stable"]

# How far, in nats, the loss must have risen above its lowest level for a finite run to count as diverged.
RISE_NATS = 1.0
# A loss less than this below its reference has not left it.
MARGIN_NATS = 0.05
# A shorter run says nothing about finite divergence.
MIN_STEPS = 100

_ADVICE = "try a lower optimizer.lr, a longer schedule.warmup_steps or a stabilizer such as +stabilizer=qknorm"


@dataclass(frozen=True)
class Verdict:
    """`first_bad_step` counts from 1 and is None unless the run diverged."""

    verdict: VerdictName
    reason: str
    first_bad_step: int | None = None


def verdict(
    loss: ArrayLike,
    grad_norm: ArrayLike,
    *,
    initial_val_loss: float | None,
    final_val_loss: float | None,
    unigram_entropy: float | None,
    n_spikes: int | None,
    warmup_steps: int,
) -> Verdict:
    """Judge a run by its training loss and gradient norm, both of shape (steps,), and its validation losses.

    All losses are in nats per token. `unigram_entropy` is that of the training data. `n_spikes` is None where
    the run is too short to have any. The first of these that holds is the verdict:

    - `diverged`: a loss or gradient norm is not finite; or, from 100 steps and past the warm-up on, the mean
      loss of the last max(20, 2%) steps is more than 1 nat above its lowest value, or the final validation
      loss is back within 0.05 nats of the initial one after the training loss had been lower.
    - `no_learning`: neither the mean training loss nor the final validation loss ever was more than 0.05 nats
      below the unigram entropy (without one, below the initial validation loss).
    - `spiky`: at least one spike. `stable`: none of these.

    Raises `ValueError` for an empty run or series of different lengths.
    """
    losses, norms = np.asarray(loss, dtype=np.float64), np.asarray(grad_norm, dtype=np.float64)
    if losses.ndim != 1 or losses.shape != norms.shape or not losses.size:
        raise ValueError(f"loss {losses.shape} and grad_norm {norms.shape} must have one value per step each")
    nonfinite = _nonfinite(losses, norms, final_val_loss)
    if nonfinite:
        return nonfinite

    width = min(max(20, -(-losses.size // 50)), losses.size)
    level = sliding_window_view(losses, width).mean(axis=1)
    long_enough = losses.size >= MIN_STEPS and losses.size > warmup_steps
    if long_enough:
        finite = _risen(level, width) or _back_at_start(level, width, initial_val_loss, final_val_loss)
        if finite:
            return finite

    reference = unigram_entropy if unigram_entropy is not None else initial_val_loss
    lowest = float(level.min()) if final_val_loss is None else min(float(level.min()), final_val_loss)
    if reference is not None and lowest >= reference - MARGIN_NATS:
        name = "initial validation loss" if unigram_entropy is None else "entropy of single tokens"
        advice = (
            "try another optimizer.lr or a larger trainer.max_steps"
            if long_enough
            else f"{losses.size} steps are few: raise trainer.max_steps"
        )
        return Verdict(
            "no_learning",
            f"The loss got to {lowest:.3f} nats and never more than {MARGIN_NATS} below the {name} of "
            f"{reference:.3f}; {advice}.",
        )
    if n_spikes:
        steps = f"{n_spikes} of {losses.size} steps {'is a spike' if n_spikes == 1 else 'are spikes'}"
        return Verdict("spiky", f"The run learned, but {steps}; {_ADVICE}.")
    if n_spikes is None:
        return Verdict("stable", "The loss fell and stayed finite; the run is too short to be tested for spikes.")
    return Verdict("stable", "The loss fell and stayed finite, without a spike.")


def _nonfinite(losses: NDArray[np.float64], norms: NDArray[np.float64], final_val_loss: float | None) -> Verdict | None:
    bad = np.flatnonzero(~(np.isfinite(losses) & np.isfinite(norms)))
    if bad.size:
        at = int(bad[0])
        name, value = ("loss", losses[at]) if not math.isfinite(losses[at]) else ("gradient norm", norms[at])
        return Verdict("diverged", f"The {name} is {value} at step {at + 1}; {_ADVICE}.", at + 1)
    if final_val_loss is not None and not math.isfinite(final_val_loss):
        step = losses.size
        return Verdict("diverged", f"The validation loss is {final_val_loss} after step {step}; {_ADVICE}.", step)
    return None


def _risen(level: NDArray[np.float64], width: int) -> Verdict | None:
    """`level[i]` is the mean loss of the `width` steps up to step i + width."""
    lowest = int(level.argmin())
    if level[-1] <= level[lowest] + RISE_NATS:
        return None
    # The last time it was fine, so that an earlier rise from which the run recovered is not blamed.
    first_bad = int(np.flatnonzero(level <= level[lowest] + RISE_NATS)[-1]) + 1 + width
    return Verdict(
        "diverged",
        f"The mean loss of {width} steps rose from {level[lowest]:.3f} at step {lowest + width} to "
        f"{level[-1]:.3f} nats and stayed more than {RISE_NATS} above from step {first_bad} on; {_ADVICE}.",
        first_bad,
    )


def _back_at_start(
    level: NDArray[np.float64], width: int, initial_val_loss: float | None, final_val_loss: float | None
) -> Verdict | None:
    if initial_val_loss is None or final_val_loss is None:
        return None
    limit = initial_val_loss - MARGIN_NATS
    # A run that never was lower is no divergence but no_learning.
    if final_val_loss < limit or level.min() >= limit:
        return None
    last = level.size - 1 + width
    high = int(np.flatnonzero(level < limit)[-1]) + 1 + width
    return Verdict(
        "diverged",
        f"The validation loss of {final_val_loss:.3f} nats after step {last} is back at its initial "
        f"{initial_val_loss:.3f}, though the training loss had been {level.min():.3f}; {_ADVICE}.",
        min(high, last),
    )
