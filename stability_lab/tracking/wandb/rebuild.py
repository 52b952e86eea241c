"""The files of a run made from what W&B knows of it, for runs that did not upload theirs. No wandb, no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stability_lab.judge.column_names import NAMES, spelling
from stability_lab.judge.series import JUDGED, Row
from stability_lab.text import flatten

_VAL_LOSS = ("val/loss", "val_loss", "eval/loss", "eval_loss", "valid/loss", "valid_loss", "validation/loss")
_LR = (*NAMES["lr"], "optimizer/lr", "optimizer/learning_rate", "training/lr", "training/learning_rate", "peak_lr")
_SEED = ("seed", "random_seed", "training/seed", "trainer/seed", "train/seed")
_STATUS = {"finished": "completed", "running": "running", "pending": "running", "failed": "failed"}
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Our name of each column, and the names that others give it.
_COLUMNS = {key: NAMES[field] for key, field in JUDGED.items() if field != "step"} | {"val/loss": _VAL_LOSS}
# Keys that the tracker adds to the config for the groups of W&B's own pages.
_GROUPING = ("stabilizers", "lr", "model_name")


def config_of(logged: Mapping[str, Any]) -> Row:
    """A run's config; that of another code gets `optimizer.lr` and `seed` where it has them under a common name."""
    config = {key: value for key, value in logged.items() if not key.startswith("_")}
    if isinstance(config.get("stabilizer"), Mapping) and isinstance(config.get("optimizer"), Mapping):
        return {key: value for key, value in config.items() if key not in _GROUPING}
    flat = {spelling(key): value for key, value in flatten(config).items()}
    lr, seed = _first(flat, _LR), _first(flat, _SEED)
    if lr is not None:
        # Moved and not copied: a comparison would take two keys that differ from run to run for two settings.
        config = {key: value for key, value in config.items() if spelling(key) not in _LR or value != lr}
        optimizer = config.get("optimizer")
        known = dict(optimizer) if isinstance(optimizer, Mapping) else {} if optimizer is None else {"name": optimizer}
        config["optimizer"] = {**known, "lr": lr}
    if seed is not None:
        config["seed"] = int(seed)
    return config


def stabilizers_of(logged: Mapping[str, Any]) -> list[str]:
    """Names of a run's stabilizers as its config has them: a group of keys, a list, or words joined by `+`."""
    value = logged.get("stabilizer", logged.get("stabilizers"))
    if isinstance(value, str):
        value = value.split("+")
    if not isinstance(value, Mapping | list | tuple):
        return []
    return sorted(name for name in (str(item).strip() for item in value) if name not in ("", "none"))


def summary_of(logged: Mapping[str, Any], state: str) -> Row:
    """Status, verdict and last values; of our own runs all that their summary.json had."""
    known = {key: _finite(value) for key, value in flatten(logged).items() if not key.startswith("_")}
    status = _STATUS.get(state, "interrupted")
    if "status" in known and "verdict" in known:
        summary = _nested({key: value for key, value in known.items() if f"final.{key}" not in known})
        return summary if status != "running" else {**summary, "status": status}
    flat = {spelling(key): value for key, value in known.items()}
    final = {"train/loss": _first(flat, NAMES["loss"]), "val/loss": _first(flat, _VAL_LOSS)}
    return {"status": status, "verdict": None, "final": {k: v for k, v in final.items() if v is not None}}


def rows_of(history: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row a step, under our names where a column has a known one; only numbers, and NaN where W&B has the word.

    What is logged at one step in several calls becomes one row; a call without a step belongs to the one before it.
    """
    logged = [row for row in map(_numbers, history) if row]
    columns = list(dict.fromkeys(key for row in logged for key in row))
    ours = {column: key for key, names in _COLUMNS.items() if (column := _column(columns, names)) is not None}
    loss = next((column for column, key in ours.items() if key == "train/loss"), None)
    step = _step_column([row for row in logged if loss is None or loss in row], columns)
    # What has one of our names already, but another column has it now.
    ours = {key: f"logged/{key}" for key in (*ours.values(), "step") if key in columns} | ours
    rows: list[Row] = []
    for row in logged:
        values = {ours.get(key, key): value for key, value in row.items() if key != step and not key.startswith("_")}
        at = row.get(step, math.nan) if step is not None else math.nan
        if not math.isfinite(at):
            at = rows[-1]["step"] if rows else 0
        if rows and rows[-1]["step"] == at:
            rows[-1].update(values)
        elif values:
            rows.append({"step": int(at) if at == int(at) else at, **values})
    return rows


def _finite(value: Any) -> Any:
    """`value`, or the number that W&B wrote as a word because JSON has none for it."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _numbers(row: Mapping[str, Any]) -> Row:
    """The numbers of a logged row; events, media and texts have no place in metrics.jsonl."""
    values = ((key, _finite(value)) for key, value in row.items() if not key.startswith("event/"))
    return {key: value for key, value in values if isinstance(value, int | float)}


def _column(columns: Sequence[str], names: Iterable[str]) -> str | None:
    return next((column for name in names for column in columns if spelling(column) == name), None)


def _step_column(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """The first known name of a step that at least half of the rows have."""
    frequent = [column for column in columns if 2 * sum(column in row for row in rows) >= len(rows)]
    return _column(frequent, NAMES["step"])


def _first(flat: Mapping[str, Any], names: Iterable[str]) -> float | None:
    values = (_finite(flat.get(name)) for name in names)
    return next((v for v in values if isinstance(v, int | float) and not isinstance(v, bool)), None)


def _nested(flat: Mapping[str, Any]) -> Row:
    """Keys joined by dots become groups again."""
    nested: Row = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return nested
