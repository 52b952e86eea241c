"""The two data files: parts.yaml, what is run, and published.yaml, what is claimed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stability_lab.config import ConfigError
from stability_lab.text import did_you_mean

HERE = Path(__file__).resolve().parent
SCALES = ("cpu", "h200", "full")


@dataclass(frozen=True)
class PartScale:
    """One part at one size. Empty `lrs`: the experiment's own rate. `more`: further seeds of single arms. `growth` uses
    the fields from `widths` on."""

    minutes: float | None
    overrides: tuple[str, ...] = ()
    lrs: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    workers: int | None = None
    settings: Mapping[str, tuple[str, ...]] | None = None
    widths: tuple[int, ...] = ()
    layers: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Part:
    """See the head of parts.yaml. Either `arms` or `compute` is set. `excluded`: arms that cannot be run, and why."""

    name: str  # of `reproduce`
    part: str
    question: str
    scales: Mapping[str, PartScale]
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metric: str = "val/loss"
    show: tuple[str, ...] = ()
    delta: float = 1.0
    injected: tuple[int, ...] = ()
    levels: tuple[float, ...] = ()
    figures: tuple[str, ...] = ("differences", "curves")
    pair: tuple[str, ...] = ()
    compute: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)

    def settings_at(self, scale: str) -> Mapping[str, tuple[str, ...]]:
        """Label -> overrides. A part without a further axis has one setting without a name."""
        return self.scales[scale].settings or self.settings or {"": ()}

    def runs_at(self, scale: str) -> list[tuple[str, str, float | None, int]]:
        """Setting, arm, learning rate and seed of each run; a part that trains nothing has none."""
        at = self.scales[scale]
        places = itertools.product(self.settings_at(scale), self.arms, at.lrs or (None,))
        return [(*place, seed) for place in places for seed in (*at.seeds, *at.more.get(place[1], ()))]


@dataclass(frozen=True)
class Reproduction:
    name: str
    about: str
    default: tuple[str, ...]
    parts: Mapping[str, Part]
    bundles: Mapping[str, tuple[str, ...]]

    def select(self, part: str | None, scale: str) -> tuple[list[Part], list[str]]:
        """The parts that `--part` names, or the default ones, and the names of those that lack this scale.

        ConfigError for an unknown name, or if no part has the scale.
        """
        if part is not None and part not in {*self.parts, *self.bundles}:
            words = did_you_mean(part, {*self.parts, *self.bundles})
            raise ConfigError(f"--part {part or repr(part)}: {self.name} has no such part: {words}")
        names = self.default if part is None else self.bundles.get(part, (part,))
        having = [name for name, part in self.parts.items() if scale in part.scales]
        chosen = [self.parts[name] for name in names if name in having]
        if not chosen:
            words = f"--part {having[0]} has" if having else "no other part has"
            raise ConfigError(f"--scale {scale}: {self.name} {', '.join(names)}: not made at this scale, but {words}")
        return chosen, [name for name in names if name not in having]


@dataclass(frozen=True)
class Claim:
    """See the head of published.yaml."""

    id: str
    parts: tuple[str, ...]
    statement: str
    source: Mapping[str, str]
    values: Mapping[str, float | str]
    test: Mapping[str, Any]
    own: bool = False
    uncertainty: float | None = None
    unit: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The reproduction that the claim belongs to."""
        prefix = self.id.partition("-")[0]
        return "small_scale_proxies" if prefix == "proxies" else prefix

    @property
    def printed(self) -> str:
        """The values as the paper prints them."""
        words = ", ".join(f"{label}: {_plain(value)}" for label, value in self.values.items())
        error = "" if self.uncertainty is None else f" ±{self.uncertainty:g}"
        unit = f" ({self.unit})" if self.unit else ""
        return f"{words}{error}{unit}"

    @property
    def where(self) -> str:
        return ", ".join(self.source[key] for key in ("text", "paper", "where") if key in self.source)


@cache
def reproductions() -> Mapping[str, Reproduction]:
    return {name: _reproduction(name, node) for name, node in _read("parts.yaml").items()}


@cache
def claims() -> tuple[Claim, ...]:
    return tuple(Claim(**entry) for entry in _read("published.yaml"))


def find(name: str) -> Reproduction:
    """ConfigError for an unknown name."""
    known = reproductions()
    if name not in known:
        raise ConfigError(f"reproduce {name}: there is no such reproduction: {did_you_mean(name, known)}")
    return known[name]


def claims_of(part: Part) -> list[Claim]:
    return [claim for claim in claims() if claim.name == part.name and part.part in claim.parts]


def _reproduction(name: str, node: Mapping[str, Any]) -> Reproduction:
    parts, sizes = {}, node.get("sizes", {})
    for key, part in node["parts"].items():
        scales = {scale: _scale(own, sizes.get(scale, ())) for scale, own in part["scales"].items()}
        parts[key] = Part(**{**part, "name": name, "part": key, "scales": scales})
    return Reproduction(name, node["about"], node["default"], parts, node.get("bundles", {}))


def _scale(own: Mapping[str, Any], size: Sequence[str]) -> PartScale:
    """`size`: the overrides of all parts at this scale; the part's own win."""
    words = last_of_each_key((*size, *own.get("overrides", ())))
    if own.get("lrs"):  # the sweep sets it
        words = [word for word in words if not word.startswith("optimizer.lr=")]
    return PartScale(**{**own, "overrides": tuple(words)})


def last_of_each_key(words: Iterable[str]) -> list[str]:
    """The overrides without those whose key comes again."""
    return list({word.partition("=")[0]: word for word in words}.values())


def _read(name: str) -> Any:
    return _frozen(yaml.safe_load((HERE / name).read_text(encoding="utf-8")))


def _frozen(node: Any) -> Any:
    """Tuples instead of lists."""
    if isinstance(node, dict):
        return {key: _frozen(value) for key, value in node.items()}
    return tuple(map(_frozen, node)) if isinstance(node, list) else node


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
