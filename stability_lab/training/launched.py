"""What torchrun says of the processes that it has started, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from stability_lab.config import ConfigError, TrainConfig


class Launched(NamedTuple):
    """This process among all of its run (`rank` of `size`), and among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


_VARIABLES = {"size": "WORLD_SIZE", "rank": "RANK", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}


def launched(environ: Mapping[str, str] = os.environ) -> Launched:
    """One process where nothing says otherwise; ConfigError where a variable is no number."""
    if environ.get("WORLD_SIZE", "1") in ("", "1"):
        return Launched()
    for name in _VARIABLES.values():
        if not environ.get(name, "").isdecimal():
            beside = "" if name == "WORLD_SIZE" else f" beside WORLD_SIZE={environ['WORLD_SIZE']}"
            raise ConfigError(
                f"{name}={environ.get(name, '')}: must be a number{beside}, as torchrun sets it; without WORLD_SIZE a "
                "run is one process"
            )
    return Launched(**{field: int(environ[name]) for field, name in _VARIABLES.items()})


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process says what every one of its machine would say."""
    return environ.get("WORLD_SIZE", "1") in ("", "1") or environ.get("LOCAL_RANK", "0") == "0"


def refuse_several(command: str, environ: Mapping[str, str] = os.environ) -> None:
    """ConfigError where torchrun starts a command that works in one process."""
    if (size := launched(environ).size) > 1:
        raise ConfigError(f"WORLD_SIZE={size}: {command} works in one process; start it without torchrun")


def check_ranks(config: TrainConfig, place: Launched, multirun: bool = False) -> None:
    """ConfigError where the configuration and torchrun do not fit each other."""
    trainer = config.trainer
    if place.size == 1:
        if trainer.parallel != "off":
            raise ConfigError(
                f"trainer.parallel={trainer.parallel}: needs several processes; start it as "
                "torchrun --nproc_per_node=2 -m stability_lab train ..."
            )
        return
    if multirun:
        raise ConfigError(
            f"WORLD_SIZE={place.size} with -m: torchrun starts the processes of one run; start a sweep without it"
        )
    if trainer.parallel == "off":
        raise ConfigError(
            f"WORLD_SIZE={place.size} with trainer.parallel=off: torchrun has started {place.size} processes for one "
            "run; add trainer.parallel=ddp, or start without torchrun"
        )
    sequences = trainer.micro_batch_size * trainer.grad_accum_steps
    if sequences % place.size:
        raise ConfigError(
            f"trainer.micro_batch_size={trainer.micro_batch_size}, trainer.grad_accum_steps={trainer.grad_accum_steps}:"
            f" the {sequences} sequences of a step must be a multiple of the {place.size} processes"
        )
    if trainer.parallel == "fsdp2" and (
        config.optimizer.get("_target_", "").rpartition(".")[2] != "AdamW" or config.model.implementation != "fused"
    ):
        raise ConfigError(
            "trainer.parallel=fsdp2: divides only what optimizer=adamw with model.implementation=fused keeps; use ddp"
        )
    if trainer.parallel == "fsdp2" and trainer.compile != "off":
        raise ConfigError(f"trainer.compile={trainer.compile}: was not made to go with trainer.parallel=fsdp2; use off")
    if trainer.compile == "full":
        raise ConfigError(
            f"trainer.compile=full: goes without trainer.parallel={trainer.parallel}, whose hooks are no part of one "
            "graph; use block"
        )
