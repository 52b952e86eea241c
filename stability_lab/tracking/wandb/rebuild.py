"""The files of a run made from what W&B knows of it, for runs that did not upload theirs. No wandb, no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stability_lab.judge.column_names import NAMES, spelling

Row = dict[str, Any]

# Our name of each thing, and the names that others give it.
_OURS = {
    "loss": "train/loss",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "tokens": "tokens",
    "skipped": "optim/skipped",
    "max_attn_logit": "attn/max_logit",
    "val_loss": "val/loss",
}
_VAL_LOSS = ("val/loss", "val_loss", "eval/loss", "eval_loss", "valid/loss", "valid_loss", "validation/loss")
_LR = (*NAMES["lr"], "optimizer/lr", "optimizer/learning_rate", "training/lr", "training/learning_rate", "peak_lr")
_SEED = ("seed", "random_seed", "training/seed", "trainer/seed", "train/seed")
_STATUS = {"finished": "completed", "running": "running", "pending": "running", "failed": "failed"}
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Keys that the tracker adds to the config for the groups of W&B's own pages.
_GROUPING = ("stabilizers", "lr", "model_name")


def config_of(logged: Mapping[str, Any]) -> Row:
    """A run's config; that of another code gets `optimizer.lr` and `seed` where it has them under a common name."""
    config = {key: value for key, value in logged.items() if not key.startswith("_")}
    if isinstance(config.get("stabilizer"), Mapping) and isinstance(config.get("optimizer"), Mapping):
        return {key: value for key, value in config.items() if key not in _GROUPING}
    flat = {spelling(key): value for key, value in _flat(config)}
    lr, seed = _first(flat, _LR), _first(flat, _SEED)
    if lr is not None:
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
    return sorted(str(name).strip() for name in value if str(name).strip() not in ("", "none"))


def summary_of(logged: Mapping[str, Any], state: str) -> Row:
    """Status, verdict and last values; of our own runs all that their summary.json had."""
    known = {key: finite_words(value) for key, value in logged.items() if not key.startswith("_")}
    status = _STATUS.get(state, "interrupted")
    if "status" in known and "verdict" in known:
        summary = _nested({key: value for key, value in known.items() if f"final.{key}" not in known})
        return summary if status != "running" else {**summary, "status": status}
    flat = {spelling(key): value for key, value in known.items()}
    final = {"train/loss": _first(flat, NAMES["loss"]), "val/loss": _first(flat, _VAL_LOSS)}
    return {
        "status": status,
        "verdict": None,
        "final": {key: value for key, value in final.items() if value is not None},
    }


def rows_of(history: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row a step, under our names where a column has a known one; only numbers, and NaN where W&B has the word.

    What is logged at one step in several calls becomes one row; a call without a step belongs to the one before it.
    """
    logged = [row for row in map(_numbers, history) if row]
    columns = list(dict.fromkeys(key for row in logged for key in row))
    names = _renamed(columns)
    loss = next((column for column, name in names.items() if name == _OURS["loss"]), None)
    step = _step_column([row for row in logged if loss is None or loss in row], columns)
    if step != "step":
        names["step"] = "logged/step"
    rows: list[Row] = []
    for row in logged:
        values = {names.get(key, key): value for key, value in row.items() if key != step and not key.startswith("_")}
        at = row.get(step, math.nan) if step is not None else math.nan
        if not math.isfinite(at):
            at = rows[-1]["step"] if rows else 0
        if rows and rows[-1]["step"] == at:
            rows[-1].update(values)
        elif values:
            rows.append({"step": int(at) if at == int(at) else at, **values})
    return rows


def finite_words(value: Any) -> Any:
    """`value`, or the number that W&B wrote as a word because JSON has none for it."""
    if isinstance(value, Mapping):
        return {key: finite_words(item) for key, item in value.items()}
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _numbers(row: Mapping[str, Any]) -> Row:
    """The numbers of a logged row; events, media and texts have no place in metrics.jsonl."""
    words = ((key, finite_words(value)) for key, value in row.items() if not key.startswith("event/"))
    return {key: value for key, value in words if isinstance(value, int | float)}


def _renamed(columns: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for role, ours in _OURS.items():
        known = _VAL_LOSS if role == "val_loss" else NAMES[role]
        found = next((column for name in known for column in columns if spelling(column) == name), None)
        if found is None or found == ours:
            continue
        names[found] = ours
        if ours in columns:
            names[ours] = f"logged/{ours}"
    return names


def _step_column(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """The first known name of a step that at least half of the rows have."""
    for name in NAMES["step"]:
        for column in columns:
            if spelling(column) == name and 2 * sum(column in row for row in rows) >= len(rows):
                return column
    return None


def _first(flat: Mapping[str, Any], names: Iterable[str]) -> float | None:
    for name in names:
        value = finite_words(flat.get(name))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _nested(flat: Mapping[str, Any]) -> Row:
    """Keys joined by dots become groups again; a key whose group is already a value keeps its name."""
    nested: Row = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        place = nested
        for group in groups:
            inner = place.setdefault(group, {})
            if not isinstance(inner, dict):
                place, name = nested, key
                break
            place = inner
        place[name] = value
    return nested
