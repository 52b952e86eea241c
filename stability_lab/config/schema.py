"""Typed schemas of the configuration and the checks that run before anything is created.

Values live in `configs/`, with a comment on what each key means; the schemas say which keys exist, their types, bounds
and roles. Sets that users extend (`stabilizer`, `data`, `tokenizer`, `tracking`) are `_target_` nodes and are checked
in `plugins/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from stability_lab.text import did_you_mean, flatten


class ConfigError(ValueError):
    """Bad input from the user: one sentence naming the key, the value and what would be right."""


def config_dir() -> Path:
    """The folder `configs`, in a wheel inside the package, in a checkout or editable install beside it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(f"the folder configs was found neither in {package} nor beside it: reinstall stability-lab")


class Parser(argparse.ArgumentParser):
    """A parser for the commands other than `train`: bad arguments are one sentence too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def add_wide(self) -> None:
        """The flag of all commands whose tables leave columns out on a narrow terminal."""
        self.add_argument("--wide", action="store_true", help="whole tables (default: what the terminal has room for)")


# What a key decides, from which `roles.py` answers who asks for it:
#   result: a weight or a metric; seed: the same, by chance alone; machine: how it is computed, so that last bits may
#   differ; place: where things lie and what they are called; writing: what is written down, and when.
Role = Literal["result", "seed", "machine", "place", "writing"]


def _key(
    role: Role = "result",
    *,
    ge: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    one_of: tuple[str, ...] = (),
) -> Any:
    """A field without a default (the YAML holds it), with its role and with bounds that `check_bounds` reads."""
    bounds = {"ge": ge, "gt": gt, "lt": lt, "le": le, "one_of": one_of}
    return field(metadata={"role": role} | {name: bound for name, bound in bounds.items() if bound not in (None, ())})


def option(default: Any, **bounds: Any) -> Any:
    """A field of a dataclass of options with its default and with the bounds of `_key`, which `instantiate` checks."""
    return field(default=default, metadata=bounds)


@dataclass
class ModelConfig:
    name: str = _key()
    family: str = _key(one_of=("decoder", "encoder"))
    d_model: int = _key(ge=1)
    n_layers: int = _key(ge=1)
    n_heads: int = _key(ge=1)
    n_kv_heads: int | None = _key(ge=1)
    d_ff: int | None = _key(ge=1)
    seq_len: int = _key(ge=1)
    vocab_size: int | None = _key(ge=2)
    pad_vocab_to: int | None = _key(ge=2)
    mlp: str = _key(one_of=("gelu", "swiglu"))
    bias: bool = _key()
    tied_head: bool = _key()
    norm_placement: str = _key(one_of=("pre", "post"))
    positions: str = _key(one_of=("rope", "learned", "sinusoidal", "none"))
    rope_theta: float = _key(gt=0)
    dropout: float = _key(ge=0, lt=1)
    attention: str = _key(one_of=("auto", "sdpa", "sdpa_fp32", "explicit", "flex"))
    implementation: str = _key("machine", one_of=("fused", "reference"))
    window: int | None = _key(ge=1)
    full_attention_every: int | None = _key(ge=1)
    rounding: RoundingConfig = _key()
    init: InitConfig = _key()


@dataclass
class RoundingConfig:
    """What is rounded on purpose, whatever the precision of the run."""

    logits: str | None = _key(one_of=("bf16",))
    scores: str | None = _key(one_of=("fp16",))
    linears: str | None = _key(one_of=("mxfp8",))
    gains: str | None = _key(one_of=("mxfp8",))


@dataclass
class InitConfig:
    scheme: str = _key(one_of=("normal", "gpt2", "mitchell", "fan_in"))
    std: float = _key(gt=0)
    truncate: float | None = _key(gt=0)


@dataclass
class ScheduleConfig:
    name: str = _key()
    warmup_steps: int = _key(ge=0)
    final_lr_fraction: float = _key(ge=0, le=1)
    decay_fraction: float = _key(gt=0, le=1)


@dataclass
class SamplingConfig:
    name: str = _key(one_of=("permutation", "random_window"))
    mask_documents: bool = _key()
    mask_repeats: bool = _key()


@dataclass
class TrainerConfig:
    max_steps: int = _key(ge=1, le=10**9)
    micro_batch_size: int = _key(ge=1)
    grad_accum_steps: int = _key(ge=1)
    grad_clip: float | None = _key(gt=0)
    precision: str = _key(one_of=("fp32", "bf16", "fp16", "fp64"))
    emulate_bf16: bool = _key("machine")
    compile: str = _key("machine", one_of=("off", "block", "full", "auto"))
    device: str = _key("machine", one_of=("auto", "cpu", "cuda"))
    parallel: str = _key("machine", one_of=("off", "ddp", "fsdp2"))
    threads: int | None = _key("machine", ge=1, le=1024)
    deterministic: bool = _key("machine")
    eval_every: int | None = _key(ge=1)
    eval_sequences: int = _key(ge=1)
    log_every: int = _key("writing", ge=1)
    save_weights: bool = _key("writing")
    checkpoint_every: int | Literal["auto"] | None = _key("writing", ge=1)
    keep_checkpoints: int = _key("writing", ge=1)


@dataclass
class DiagnosticsConfig:
    probe_every: int | None = _key(ge=1)
    probe_sequences: int = _key(ge=1)


@dataclass
class StabilityConfig:
    stop_on_divergence: bool = _key()
    on_nonfinite: str = _key(one_of=("stop", "skip", "warn"))


@dataclass
class SweepConfig:
    strict: bool = _key("writing")
    fail_fast: bool = _key("writing")
    workers: int | Literal["auto"] = _key("writing", ge=1, le=1024)


@dataclass
class DebugConfig:
    inject: list[str] | None = _key()


@dataclass
class TrainConfig:
    """Everything that one run is made of; `build.py` turns it into objects."""

    seed: int = _key("seed", ge=0, le=2**62)
    init_seed: int | None = _key("seed", ge=0, le=2**62)
    data_seed: int | None = _key("seed", ge=0, le=2**62)
    output_dir: str = _key("place")
    group: str | None = _key("place")
    run_name: str | None = _key("place")
    if_exists: str | None = _key("place", one_of=("new", "skip", "resume", "error", "overwrite"))
    resume: str | None = _key("place")
    model: ModelConfig = _key()
    stabilizer: dict[str, Any] = _key()
    data: dict[str, Any] = _key()
    tokenizer: dict[str, Any] = _key()
    sampling: SamplingConfig = _key()
    objective: dict[str, Any] = _key()
    optimizer: dict[str, Any] = _key()
    schedule: ScheduleConfig = _key()
    trainer: TrainerConfig = _key()
    diagnostics: DiagnosticsConfig = _key()
    tracking: dict[str, Any] = _key("writing")
    stability: StabilityConfig = _key()
    sweep: SweepConfig = _key()
    debug: DebugConfig = _key()
    # name, source and what the published model has and the recipe has not
    recipe: dict[str, Any] | None = field(default=None, metadata={"role": "writing"})
    # name -> what it provokes, and its source; the keys that do it are set where they are
    stressor: dict[str, Any] | None = field(default=None, metadata={"role": "writing"})

    @property
    def lr(self) -> float:
        """The peak of the schedule."""
        return self.optimizer["lr"]


# What other programs call a key, where its own last part does not show it.
_OF_OTHERS = {
    **dict.fromkeys(("num_steps", "train_steps", "iters", "iterations"), "trainer.max_steps"),
    **dict.fromkeys(("path", "file", "data_path", "dataset"), "data.path"),
    **dict.fromkeys(("block_size", "context_length", "sequence_length"), "model.seq_len"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("n_embd", "hidden_size"), "model.d_model"),
    "wd": "optimizer.weight_decay",
}
OPEN_SETS = ("stabilizer", "data", "tokenizer", "objective", "optimizer", "tracking")


def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
    """The typed and checked configuration of a resolved plain dict; ConfigError for anything that is wrong."""
    config = _typed(TrainConfig, plain, "", flatten(plain))
    folders = {key: os.path.expanduser(path) for key in ("output_dir", "resume") if (path := getattr(config, key))}
    config = dataclasses.replace(config, **folders)
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty: give a folder, such as outputs")
    for key in ("group", "run_name"):
        name = getattr(config, key)
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", name):
            allowed = "up to 96 letters, digits, '.', '_' and '-', without '.' or '-' in front"
            raise ConfigError(f"{key}={name}: must be a folder's name of {allowed}")
    if "lr" not in config.optimizer:
        raise ConfigError("optimizer.lr is missing: give it a value")
    config.optimizer["lr"] = convert("optimizer.lr", config.optimizer["lr"], float)
    check_bounds("optimizer.lr", config.lr, {"gt": 0})
    _check_model(config.model)
    return config


def typed_fields(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass; annotations may be strings."""
    import typing

    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _typed(cls: type, plain: Any, prefix: str, keys: Iterable[str]) -> Any:
    """`keys` are those of the whole configuration, for a hint where one is in the wrong place."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}={plain!r}: must be a group of keys, not a single value")
    types = typed_fields(cls)
    for name in plain:
        if name not in types:
            elsewhere = [key for key in keys if key.rpartition(".")[0] != prefix.rstrip(".")]
            meant = _OF_OTHERS.get(str(name)) if not prefix else None
            hint = f"did you mean {meant}?" if meant else did_you_mean(str(name), types, elsewhere)
            raise ConfigError(f"{prefix}{name} is not a key of the configuration: {hint}")
    values = {}
    for f in dataclasses.fields(cls):
        key = prefix + f.name
        if f.name not in plain:
            if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING:
                continue
            raise ConfigError(f"{key} is missing: give it a value")
        kind = types[f.name]
        if dataclasses.is_dataclass(kind):
            values[f.name] = _typed(kind, plain[f.name], key + ".", keys)  # pyright: ignore[reportArgumentType]
        else:
            values[f.name] = convert(key, plain[f.name], kind)
            check_bounds(key, values[f.name], f.metadata)
    return cls(**values)


def convert(key: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`, or a ConfigError.

    `kind` is bool, int, float, str, Literal[...], list[...] of these or dict[str, Any], or one of these `| None` or
    `| Literal[...]`.
    An integral float is an int (`max_steps=1e4`), an int is a float, and a string such as "1e-4", which YAML does
    not read as a number, is one. Nothing else is converted.
    """
    import types
    import typing

    alternatives = typing.get_args(kind) if isinstance(kind, types.UnionType) or _is_union(kind) else (kind,)
    optional = type(None) in alternatives
    words = [word for a in alternatives if typing.get_origin(a) is Literal for word in typing.get_args(a)]
    if value in words:
        return value
    kinds = [a for a in alternatives if a is not type(None) and typing.get_origin(a) is not Literal]
    kind = kinds[0] if kinds else Literal
    if kind not in _WORDS and typing.get_origin(kind) not in (list, dict):
        raise ConfigError(f"{key}: its class declares {kind}, and {_KINDS}")
    shown = f"{key}={value if value is not None else 'null'}"
    choices = [word for word in (_WORDS.get(kind, "a group of keys"), *words) if word]
    if value is None:
        if optional:
            return None
        raise ConfigError(f"{shown}: must be {' or '.join(choices)}, and null is none")
    if typing.get_origin(kind) is list:
        items = value if isinstance(value, list | tuple) else [value]
        return [convert(key, item, typing.get_args(kind)[0]) for item in items]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{shown}: must be a group of keys")
        return dict(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = _number(value)
        if number is not None and not math.isnan(number):
            if kind is float:
                return float(number) + 0.0  # -0.0 is 0.0
            if isinstance(number, int) or number.is_integer():
                return int(number)
    raise ConfigError(f"{shown}: must be {' or '.join([*choices, *(['null'] if optional else [])])}")


def _is_union(kind: Any) -> bool:
    """`int | Literal["auto"]` is a Union of typing's, `int | None` one of Python's."""
    import typing

    return typing.get_origin(kind) is typing.Union


_WORDS = {bool: "true or false", int: "a whole number", float: "a number such as 3e-3", str: "a word", Literal: ""}
_KINDS = "an option is of bool, int, float, str, Literal[...], list[...] of these or dict[str, Any], or None too"


def _number(value: int | float | str) -> int | float | None:
    if not isinstance(value, str):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return None


def check_bounds(key: str, value: Any, bounds: Mapping[str, Any]) -> None:
    if value is None or not bounds or (isinstance(value, str) and "one_of" not in bounds):
        return
    shown = f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
    if "one_of" in bounds and value not in bounds["one_of"]:
        allowed = ", ".join(bounds["one_of"])
        raise ConfigError(f"{shown}: must be {'one of ' if len(bounds['one_of']) > 1 else ''}{allowed}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{shown}: must be finite")
    for name, holds, words in (
        ("ge", lambda b: value >= b, "or more"),
        ("gt", lambda b: value > b, ""),
        ("le", lambda b: value <= b, "or less"),
        ("lt", lambda b: value < b, ""),
    ):
        if name in bounds and not holds(bounds[name]):
            more = {"gt": "more than ", "lt": "less than "}.get(name, "")
            raise ConfigError(f"{shown}: must be {more}{bounds[name]:g} {words}".rstrip())


def _check_model(m: ModelConfig) -> None:
    if m.d_model % m.n_heads:
        fitting = [h for h in range(1, min(m.d_model, 10_000) + 1) if m.d_model % h == 0]
        near = ", ".join(str(h) for h in sorted(fitting, key=lambda h: abs(h - m.n_heads))[:3])
        raise ConfigError(f"model.n_heads={m.n_heads}: must divide model.d_model={m.d_model}; near it are {near}")
    if m.n_kv_heads is not None and m.n_heads % m.n_kv_heads:
        raise ConfigError(f"model.n_kv_heads={m.n_kv_heads}: must divide model.n_heads={m.n_heads}")
    if m.positions == "rope" and (m.d_model // m.n_heads) % 2:
        raise ConfigError(
            f"model.n_heads={m.n_heads}: RoPE needs an even head_dim, and d_model / n_heads is "
            f"{m.d_model // m.n_heads}; choose another number of heads or model.positions=learned"
        )
