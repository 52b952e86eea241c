"""Faults on purpose, to see what the judge and the loop make of them: `debug.inject=nan_grad@20`.

| fault | what happens at step k |
|---|---|
| nan_grad@k | one gradient becomes NaN |
| nan_loss@k, inf_loss@k | the loss, and with it every gradient, becomes NaN or infinite |
| lr_spike@kxF | the learning rate is F times the schedule's |
| bad_batch@k | every sequence of the batch is one short n-gram, repeated |
| data_shift@k | from here on every sequence is read backwards: another language of the same letters |
| all_ignored@k | no target is valid |
| raise@k | an exception |
| kill@k | the process kills itself (SIGKILL) before the step |
| kill_in_checkpoint@k | a checkpoint is written after the step, and the process kills itself inside the write |

A run that is resumed goes past the last three: a fault that comes back for ever could not be recovered from.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stability_lab.config import ConfigError
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.objective import Batch

ENDS_THE_PROCESS = ("raise", "kill", "kill_in_checkpoint")
KINDS = ("nan_grad", "nan_loss", "inf_loss", "lr_spike", "bad_batch", "data_shift", "all_ignored", *ENDS_THE_PROCESS)
NGRAM = 4  # tokens of the n-gram that a bad batch repeats


class InjectedFault(RuntimeError):
    """What `raise@k` raises."""


@dataclass(frozen=True)
class Fault:
    kind: str
    step: int
    factor: float = 1.0  # of the learning rate


def parse(faults: str | Iterable[str] | None, max_steps: int) -> tuple[Fault, ...]:
    """`nan_grad@20` or a list of such; ConfigError naming debug.inject for anything else.

    A fault after `max_steps`, the last step, would never happen and is refused too.
    """
    texts = [] if faults is None else [faults] if isinstance(faults, str) else list(faults)
    return tuple(_parse(text, max_steps) for text in texts)


def _parse(text: str, max_steps: int) -> Fault:
    match = re.fullmatch(r"([a-z_]+)@(\d+)(?:x([0-9.eE+-]+))?", str(text))
    kind = match[1] if match else ""
    if not match or kind not in KINDS:
        raise ConfigError(f"debug.inject={text}: must be KIND@STEP with KIND one of {', '.join(KINDS)}")
    step = int(match[2])
    if step < 1:
        raise ConfigError(f"debug.inject={text}: steps count from 1")
    if step > max_steps:
        raise ConfigError(f"debug.inject={text}: the run ends at step {max_steps} (trainer.max_steps)")
    if (kind == "lr_spike") != (match[3] is not None):
        raise ConfigError(f"debug.inject={text}: lr_spike@STEPxFACTOR takes a factor, and nothing else does")
    try:
        factor = float(match[3] or 1)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ConfigError(f"debug.inject={text}: the factor is {match[3]}, but must be a number above 0")
    return Fault(kind, step, factor)


class Injector:
    """What the faults do to a step; without faults every method gives back what it got."""

    def __init__(self, faults: Iterable[Fault] = ()):
        self.faults: dict[int, list[Fault]] = {}
        for fault in faults:
            self.faults.setdefault(fault.step, []).append(fault)
        self.shifted_from = min((step for step in self.faults if "data_shift" in self._kinds(step)), default=math.inf)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return "kill_in_checkpoint" in self._kinds(step)

    def in_checkpoint(self, step: int) -> None:
        if "kill_in_checkpoint" in self._kinds(step):
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, step: int) -> None:
        kinds = self._kinds(step)
        if "raise" in kinds:
            raise InjectedFault(f"debug.inject=raise@{step}")
        if "kill" in kinds:
            os.kill(os.getpid(), signal.SIGKILL)

    def lr(self, step: int, lr: float) -> float:
        for fault in self.faults.get(step, ()):
            lr *= fault.factor
        return lr

    def tokens(self, step: int, tokens: Tensor) -> Tensor:
        """(N, T+1); a bad batch repeats the first n-gram of each sequence, as a damaged document would."""
        if step >= self.shifted_from:
            tokens = tokens.flip(1)
        if "bad_batch" not in self._kinds(step):
            return tokens
        repeats = -(-tokens.shape[1] // NGRAM)
        return tokens[:, :NGRAM].repeat(1, repeats)[:, : tokens.shape[1]]

    def targets(self, step: int, batch: Batch) -> Batch:
        if "all_ignored" not in self._kinds(step):
            return batch
        return batch._replace(targets_MT=torch.full_like(batch.targets_MT, IGNORE))

    def poison(self, step: int) -> str | None:
        """`nan_grad`, `nan_loss` or `inf_loss`: what `TrainStep` is to do to this step."""
        return next((k for k in self._kinds(step) if k in ("nan_grad", "nan_loss", "inf_loss")), None)

    def _kinds(self, step: int) -> set[str]:
        return {fault.kind for fault in self.faults.get(step, ())}
