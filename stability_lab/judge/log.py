"""The series that the judge reads: one entry per logged optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Log:
    """Arrays of shape (n,), one entry per logged optimizer step, with at least one of `loss` and `grad_norm`.

    `step` rises strictly; `loss` is cross-entropy in nats and `grad_norm` the global L2 norm before clipping, both
    as logged: NaN and infinities are values and stay. A step that has no value of one of the two, which is not the
    same as NaN, is marked in `no_loss` or `no_grad_norm`. `lr`, `tokens` and `log_z`, a mean over tokens, are NaN where
    unknown, `max_attn_logit` where no probe ran. `skipped` marks steps whose update did not happen: fp16 loss-scale
    skips and `on_nonfinite=skip`. Anything that numpy can read as an array is accepted; raises `ValueError` otherwise.
    """

    step: NDArray[np.int64]
    loss: NDArray[np.float64] | None
    grad_norm: NDArray[np.float64] | None
    lr: NDArray[np.float64] | None = None
    tokens: NDArray[np.float64] | None = None
    skipped: NDArray[np.bool_] | None = None
    max_attn_logit: NDArray[np.float64] | None = None
    log_z: NDArray[np.float64] | None = None
    no_loss: NDArray[np.bool_] | None = None
    no_grad_norm: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        types = {"step": np.int64, "skipped": np.bool_, "no_loss": np.bool_, "no_grad_norm": np.bool_}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.asarray(value, dtype=types.get(name, np.float64)))
        if self.step.ndim != 1:
            raise ValueError(f"step has shape {self.step.shape}, but must have one value per logged step")
        if self.loss is None and self.grad_norm is None:
            raise ValueError("the log has neither a loss nor a gradient norm")
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None and value.shape != self.step.shape:
                raise ValueError(f"{name} has shape {value.shape}, but must have one value per step: {self.step.shape}")
        for name, series in self.signals.items():
            if not self.has(name).all():  # whoever forgets to ask then finds no number there
                object.__setattr__(self, name, np.where(self.has(name), series, np.nan))
        if np.any(np.diff(self.step) <= 0):
            row = int(np.flatnonzero(np.diff(self.step) <= 0)[0]) + 1
            raise ValueError(f"step must rise, but {self.step[row]} follows {self.step[row - 1]}")

    def __len__(self) -> int:
        return self.step.size

    @cached_property
    def stride(self) -> int:
        """Steps from one row to the next: the most frequent difference of `step`, 1 for a single row."""
        return stride_of(self.step)

    @property
    def signals(self) -> dict[str, NDArray[np.float64]]:
        """The series that are scored, by name."""
        named = {"grad_norm": self.grad_norm, "loss": self.loss}
        return {name: series for name, series in named.items() if series is not None}

    def has(self, name: str) -> NDArray[np.bool_]:
        """Which rows have a value of the signal `name`, be it NaN."""
        if name not in self.signals:
            return np.zeros(len(self), dtype=np.bool_)
        absent = {"loss": self.no_loss, "grad_norm": self.no_grad_norm}[name]
        return np.ones(len(self), dtype=np.bool_) if absent is None else ~absent

    def nonfinite(self, name: str) -> NDArray[np.bool_]:
        """Which rows have a value of the signal `name` that is no number."""
        return self.has(name) & ~np.isfinite(self.signals[name])

    def having(self, name: str) -> Log:
        """The log of the rows that have a value of the signal `name`."""
        has = self.has(name)
        return self if has.all() else self.rows(has)

    def rows(self, which: NDArray[np.bool_] | slice) -> Log:
        """The log of the selected rows alone."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[which] for name, value in values.items() if value is not None})

    def kept(self) -> Log:
        """The log without skipped steps."""
        return self if self.skipped is None or not self.skipped.any() else self.rows(~self.skipped)


def stride_of(step: NDArray[np.int64]) -> int:
    """The most frequent difference of rising steps, 1 for a single one."""
    if step.size < 2:
        return 1
    gaps, counts = np.unique(np.diff(step), return_counts=True)
    return int(gaps[counts.argmax()])
