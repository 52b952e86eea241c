"""From the words of a command to checked configurations, before Hydra creates anything.

All jobs of a command are composed here first, so that a typo in a key of the last one is one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from stability_lab.command_line import ROOT, STABILIZER, CommandLine, parse, sentence
from stability_lab.config import ConfigError, TrainConfig, config_dir, from_plain, typed

_SILENT = {"version": 1, "root": None, "disable_existing_loggers": False}  # Hydra's logging `none`


class Composed(NamedTuple):
    config: TrainConfig
    plain: dict[str, Any]  # the same as a plain dict: what config.yaml, fingerprint and tracker get
    notices: tuple[str, ...]


def compose_jobs(command: CommandLine) -> list[Composed]:
    """Compose and check every job; ConfigError for the first that is wrong.

    Jobs that choose the same options are composed once, and each sets its values in a copy, as Hydra itself would.
    """
    bases: dict[tuple[str, ...], DictConfig] = {}
    made = []
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for job in command.jobs:
            values = [line for line in job if line.startswith("++") and not line.startswith(("++hydra", "++="))]
            rest = tuple(line for line in job if line not in values)
            if any(line.startswith("~") for line in rest):  # what is deleted may be set before or after
                made.append(checked(_compose(job)))
                continue
            if rest not in bases:
                bases[rest] = _compose(rest)
            cfg = deepcopy(bases[rest])
            for line in values:
                _set(cfg, line)
            made.append(checked(cfg))
    return made


def _compose(overrides: Iterable[str]) -> DictConfig:
    """What Hydra makes of these words, without its own section."""
    try:
        cfg = compose(ROOT, overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error
    _check_hydra(cfg["hydra"])
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _set(cfg: DictConfig, line: str) -> None:
    (override,) = _parsed(line)
    try:
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{line.lstrip('+')}: {sentence(error)}") from error


@cache
def _parsed(line: str) -> tuple[Override, ...]:
    return tuple(parse([line]))


def _check_hydra(hydra: DictConfig) -> None:
    """Hydra imports what these keys of its own section name, and a file of a --config-dir may set them."""
    if hydra.callbacks:
        raise ConfigError(f"hydra.callbacks.{next(iter(hydra.callbacks))}: Hydra's callbacks are not supported")
    for key in ("job_logging", "hydra_logging"):
        if hydra[key] != _SILENT:
            raise ConfigError(f"hydra.{key}: Hydra's logging is not supported; leave it at hydra/{key}=none")


def checked(cfg: DictConfig) -> Composed:
    """Resolve a composed config, drop what belongs to stabilizers that this job has not, and check the rest."""
    plain, notices = _resolve(cfg)
    return composed_of(plain, notices)


def composed_of(plain: Mapping[str, Any], notices: tuple[str, ...]) -> Composed:
    """Check a configuration and give each value the type of its key, so that `1e1` and `10` make the same run.

    The options of open sets have types only in their classes, and composing imports none: see `typed_options`.
    """
    return Composed(from_plain(plain), typed(plain), notices)


def _resolve(cfg: DictConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        if "issing mandatory value" in str(error) and key:
            raise ConfigError(f"{key} is missing: give it a value, {key}=...") from error
        raise ConfigError(f"{key}: {sentence(error)}" if key else sentence(error)) from error
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    chosen = plain.get(STABILIZER) or {}
    assert isinstance(chosen, dict)
    notices = []
    for name, options in list(chosen.items()):
        if isinstance(options, Mapping) and "_target_" not in options:
            del chosen[name]
            keys = ", ".join(f"stabilizer.{name}.{option}" for option in options)
            notices.append(f"{keys} is ignored here: this run has no {name}")
    plain[STABILIZER] = chosen
    return {str(k): v for k, v in plain.items()}, tuple(notices)
