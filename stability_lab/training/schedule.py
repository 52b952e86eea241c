"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stability_lab.config import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate of step 1, 2, ..., max_steps.

    Linear warm-up reaches `peak` at `warmup_steps`; then `cosine` falls to final_lr_fraction * peak at the last step,
    `wsd` (warm-up, stable, decay; arXiv:2404.06395) holds the peak and falls linearly over the last decay_fraction of
    the run, `constant` holds it. A warm-up longer than the run is cut to the run.
    """

    name: str
    peak: float
    max_steps: int
    warmup_steps: int
    final_lr_fraction: float
    decay_fraction: float

    @classmethod
    def of(cls, config: ScheduleConfig, peak: float, max_steps: int) -> Schedule:
        warmup = min(config.warmup_steps, max_steps)
        return cls(config.name, peak, max_steps, warmup, config.final_lr_fraction, config.decay_fraction)

    def lr(self, step: int) -> float:
        assert 1 <= step <= self.max_steps
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * self._factor(step)

    def _factor(self, step: int) -> float:
        if self.name == "constant":
            return 1.0
        start = self.warmup_steps
        if self.name == "wsd":
            start = max(start, self.max_steps - round(self.decay_fraction * self.max_steps))
        if step <= start:
            return 1.0
        progress = (step - start) / (self.max_steps - start)
        remaining = 1 - progress if self.name == "wsd" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * remaining
