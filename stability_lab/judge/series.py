"""The series of a run, whoever trains it: from rows to the log that the judge reads."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability_lab.judge.log import Log

Row = dict[str, Any]

# Keys of a row that the judge reads, and the field of a Log that each one fills.
JUDGED = {
    "step": "step",
    "train/loss": "loss",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "lr",
    "tokens": "tokens",
    "optim/skipped": "skipped",
    "attn/max_logit": "max_attn_logit",
    "train/log_z_mean": "log_z",
}
_MAY_BE_UNKNOWN = ("lr", "tokens", "max_attn_logit", "log_z")


def perplexity(loss: float) -> float:
    """exp of a mean cross-entropy in nats; `inf` on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def perplexity_in(values: Mapping[str, Any], split: str) -> tuple[str, str]:
    """Key and name of the perplexity in a row or summary: that of masked tokens says so."""
    masked = f"{split}/masked_ppl"
    return (masked, "masked perplexity") if masked in values else (f"{split}/ppl", "perplexity")


class Series:
    """One fp64 column for each key of `JUDGED` and for those in `more`; NaN where a row has no value."""

    def __init__(self, more: tuple[str, ...] = ()):
        self._columns = {key: array("d") for key in (*JUDGED, *more)}
        self._no_norm = array("b")  # which rows have no gradient norm, which is not the same as a NaN

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, or replace the newest one by a row of the same step."""
        if len(self) and row["step"] == self._columns["step"][-1]:
            for column in (*self._columns.values(), self._no_norm):
                column.pop()
        for key, column in self._columns.items():
            value = row.get(key)
            column.append(math.nan if value is None else value)
        self._no_norm.append(row.get("optim/grad_norm") is None)

    def column(self, key: str) -> NDArray[np.float64]:
        """A copy of a column, shape (n,)."""
        return np.array(self._columns[key])

    def columns(self) -> dict[str, NDArray[np.float64]]:
        return {key: self.column(key) for key in self._columns}

    def restore(self, columns: Mapping[str, NDArray[np.float64]]) -> None:
        """The opposite of `columns`, of rows that all had a gradient norm; ValueError where the columns are others."""
        shapes = {values.shape for values in columns.values()}
        if columns.keys() != self._columns.keys() or len(shapes) != 1 or len(shapes.pop()) != 1:
            raise ValueError(f"the series {sorted(columns)} are not those of this version")
        self._columns = {key: array("d", np.asarray(columns[key], np.float64).tobytes()) for key in self._columns}
        self._no_norm = array("b", bytes(len(self)))

    def log(self) -> Log:
        """The log without series that are unknown throughout; it also says which rows have no gradient norm."""
        fields: dict[str, Any] = {field: self.column(key) for key, field in JUDGED.items()}
        for name in _MAY_BE_UNKNOWN:
            if np.isnan(fields[name]).all():
                del fields[name]
        absent = np.array(self._no_norm, dtype=np.bool_)
        if absent.all():
            fields["grad_norm"] = None
        elif absent.any():
            fields["no_grad_norm"] = absent
        return Log(**{**fields, "skipped": fields["skipped"] > 0})
