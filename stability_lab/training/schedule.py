"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stability_lab.config import ConfigError, ScheduleConfig

RAMP = 1000  # how much larger the peak is than the rate at which a ramp begins


@dataclass(frozen=True)
class Schedule:
    """Learning rate of step 1, 2, ..., max_steps.

    Linear warm-up reaches `peak` at `warmup_steps`; what follows is the shape in `SHAPES` that `name` names. A warm-up
    longer than the run is cut to the run. ConfigError for a name that is none of them,
    and for a ramp with a warm-up.
    """

    name: str
    peak: float
    max_steps: int
    warmup_steps: int
    final_lr_fraction: float
    decay_fraction: float

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ConfigError(f"schedule.name={self.name}: must be one of {', '.join(SHAPES)}")
        if self.name == "ramp" and self.warmup_steps:
            raise ConfigError(f"schedule.warmup_steps={self.warmup_steps}: a ramp has no warm-up; set it to 0")

    @classmethod
    def of(cls, config: ScheduleConfig, peak: float, max_steps: int) -> Schedule:
        warmup = min(config.warmup_steps, max_steps)
        return cls(config.name, peak, max_steps, warmup, config.final_lr_fraction, config.decay_fraction)

    def lr(self, step: int) -> float:
        assert 1 <= step <= self.max_steps
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        return self.peak * SHAPES[self.name](self, step)


def _constant(schedule: Schedule, step: int) -> float:
    """The peak to the end."""
    return 1.0


def _cosine(schedule: Schedule, step: int) -> float:
    """Half a cosine down to final_lr_fraction of the peak at the last step."""
    progress = (step - schedule.warmup_steps) / (schedule.max_steps - schedule.warmup_steps)
    return _between(schedule, (1 + math.cos(math.pi * progress)) / 2)


def _wsd(schedule: Schedule, step: int) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395): a line over the last decay_fraction of the run."""
    start = max(schedule.warmup_steps, schedule.max_steps - round(schedule.decay_fraction * schedule.max_steps))
    return 1.0 if step <= start else _between(schedule, 1 - (step - start) / (schedule.max_steps - start))


def _ramp(schedule: Schedule, step: int) -> float:
    """Up to the peak at the last step, by the same factor each step: the rate at which a run fails is one number."""
    return RAMP ** (step / schedule.max_steps - 1)


def _between(schedule: Schedule, remaining: float) -> float:
    return schedule.final_lr_fraction + (1 - schedule.final_lr_fraction) * remaining


# The part of the peak at a step after the warm-up.
SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": _constant,
    "ramp": _ramp,
}
