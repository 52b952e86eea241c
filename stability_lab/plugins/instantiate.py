"""From a `_target_` node of a configuration to the object that it describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from stability_lab.config import OPEN_SETS, ConfigError, check_bounds, convert, typed_fields
from stability_lab.plugins.trust import load_class
from stability_lab.text import did_you_mean

T = TypeVar("T")


def instantiate_as(kind: type[T], node: Mapping[str, Any], key: str) -> T:
    """The same for what must fulfil the runtime protocol `kind`; ConfigError where it does not."""
    made = instantiate(node, key)
    if not isinstance(made, kind):
        contract = f"{kind.__module__}.{kind.__name__}"
        raise ConfigError(f"{key}._target_={node['_target_']}: must have all that {contract} asks for")
    return made


def instantiate(node: Mapping[str, Any], key: str) -> Any:
    """The object of a `_target_` node; ConfigError naming `key` for a foreign target, a wrong field or value.

    Only trusted classes are imported: a config file that came with somebody's run cannot run code.
    """
    cls, values = _options(node, key)
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.{error}") from error


def typed_options(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose open sets have each option as its class declares it; ConfigError as `instantiate`."""
    sets = {name: _typed(plain[name], name) for name in OPEN_SETS if name != "stabilizer"}
    chosen = {name: _typed(node, f"stabilizer.{name}") for name, node in plain["stabilizer"].items()}
    return {**plain, **sets, "stabilizer": chosen}


def _typed(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**node, **_options(node, key)[1]}


def _options(node: Mapping[str, Any], key: str) -> tuple[type, dict[str, Any]]:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}={node}: must be a group of options, such as {key}.option=value")
    target = node.get("_target_")
    cls = load_class(target, key)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{key}._target_={target}: must be a dataclass of options")
    types, values = typed_fields(cls), {}
    bounds = {field.name: field.metadata for field in dataclasses.fields(cls)}
    for name, value in node.items():
        if name == "_target_":
            continue
        if name not in types:
            raise ConfigError(f"{key}.{name} is not an option of {key}: {did_you_mean(name, types)}")
        values[name] = convert(f"{key}.{name}", value, types[name])
        check_bounds(f"{key}.{name}", values[name], bounds[name])
    return cls, values
