"""One value for all the ways to write it: `1e1` and `10`, `3e-3` and `0.003`, null and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from stability_lab.config.roles import schema_keys
from stability_lab.config.schema import ConfigError, TrainConfig, convert

_SAME_AS = {"init_seed": "seed", "data_seed": "seed", "model.n_kv_heads": "model.n_heads"}  # where null


@cache
def _kinds() -> dict[str, Any]:
    return {key: kind for key, _, kind in schema_keys(TrainConfig)} | {"optimizer.lr": float}


def typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested configuration in which each value is of its key's type.

    What is no key of the schema, or does not fit, stays as it is: the configuration may be another program's.
    """
    return _typed(config, "")


def _typed(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key: _typed(value, f"{prefix}{key}.") if isinstance(value, Mapping) else _one(f"{prefix}{key}", value)
        for key, value in node.items()
    }


def _one(key: str, value: Any) -> Any:
    kind = _kinds().get(key)
    if kind is None:
        return value
    try:
        return convert(key, value, kind)
    except ConfigError:
        return value


def by_value(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration of typed values, with null where a value is what null stands for.

    The other way round would give every run another fingerprint than it had. What null means for `trainer.threads` and
    `model.vocab_size` no configuration knows: the machine does, and the tokenizer.
    """
    values = dict(flat)
    stands_for = {key: values.get(other) for key, other in _SAME_AS.items()}
    if isinstance(width := values.get("model.d_model"), int):
        stands_for["model.d_ff"] = 4 * width
    stands_for["debug.inject"] = []
    return values | {key: None for key, value in stands_for.items() if key in values and values[key] == value}
