"""Each check sees the fault that it is there for, and says so in one sentence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from stability_lab.seams import Scale, Seams, Site
from stability_lab.testing import check_stabilizer


@dataclass(frozen=True)
class Sound:
    name: ClassVar[str] = "mine"
    paper: ClassVar[str] = "none"
    summary: ClassVar[str] = "logits times a factor"
    factor: float = 2.0

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, logit_transform=self._transform)

    def _transform(self, site: Site) -> nn.Module:
        return Scale(self.factor)


@dataclass(frozen=True)
class OtherName(Sound):
    name: ClassVar[str] = "yours"


@dataclass
class NotFrozen:
    name: ClassVar[str] = "mine"
    paper: ClassVar[str] = "none"
    summary: ClassVar[str] = "nothing"
    factor: float = 2.0

    def apply(self, seams: Seams) -> Seams:
        return seams


@dataclass(frozen=True)
class SaysNothing(Sound):
    summary: ClassVar[str] = ""


@dataclass(frozen=True)
class MoreOptions(Sound):
    unwritten: int = 3


@dataclass(frozen=True)
class ClaimsNothing(Sound):
    def apply(self, seams: Seams) -> Seams:
        return seams


@dataclass(frozen=True)
class ForeignClaim(Sound):
    def apply(self, seams: Seams) -> Seams:
        return seams.claim("somebody", logit_transform=self._transform)


@dataclass(frozen=True)
class NoEffect(Sound):
    def _transform(self, site: Site) -> nn.Module:
        return nn.Identity()


@dataclass(frozen=True)
class FalseIdentity(Sound):
    identity: ClassVar[bool] = True


class UnusedParameter(Scale):
    def __init__(self, factor: float):
        super().__init__(factor)
        self.unused = nn.Parameter(torch.ones(3))


@dataclass(frozen=True)
class NoGradient(Sound):
    def _transform(self, site: Site) -> nn.Module:
        return UnusedParameter(self.factor)


class Overflow(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


@dataclass(frozen=True)
class NotFinite(Sound):
    def _transform(self, site: Site) -> nn.Module:
        return Overflow(self.factor)


@dataclass(frozen=True)
class OtherGains(Sound):
    """Under the names of the baseline's LayerNorm."""

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, norm=self._norm)

    def _norm(self, site: Site) -> nn.Module:
        norm = nn.LayerNorm(site.d_model)
        nn.init.constant_(norm.weight, 2.0)
        return norm


class AsksTheHost(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if x.sum().item() > -1e9 else x


@dataclass(frozen=True)
class BreaksTheGraph(Sound):
    def _transform(self, site: Site) -> nn.Module:
        return AsksTheHost(self.factor)


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.rand(1)  # no buffer, so no checkpoint has it

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 + self.factor)


@dataclass(frozen=True)
class NotInTheCheckpoint(Sound):
    def _transform(self, site: Site) -> nn.Module:
        return Drawn()


@dataclass(frozen=True)
class DislikesCompany(Sound):
    def apply(self, seams: Seams) -> Seams:
        if seams.owners:
            raise ValueError("I was not first")
        return super().apply(seams)


@dataclass(frozen=True)
class Overwrites(Sound):
    """Without `claim`, which would have seen the conflict."""

    def apply(self, seams: Seams) -> Seams:
        return Seams().claim(self.name, logit_transform=self._transform)


def check(cls: type, folder: Path, **more: Any) -> None:
    file = folder / "stabilizer" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"mine:\n  _target_: {__name__}.{cls.__name__}\n  factor: 2.0\n", encoding="utf-8")
    check_stabilizer("mine", config_dir=folder, allow=[__name__], **more)


def test_a_sound_one_passes(tmp_path: Path) -> None:
    check(Sound, tmp_path)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (OtherName, "its `name` is yours, and its YAML is called mine"),
        (NotFrozen, "NotFrozen must be a frozen dataclass"),
        (SaysNothing, "`paper` and `summary` must say something"),
        (MoreOptions, r"must hold its options \['factor', 'unwritten'\], and has \['factor'\]"),
        (ClaimsNothing, "claims no seam"),
        (ForeignClaim, "it claims 'logit_transform' under the name somebody"),
        (NoEffect, "it has no effect"),
        (FalseIdentity, "declares `identity = True`, and"),
        (NoGradient, r"the parameter \S*unused gets no gradient"),
        (NotFinite, "is not finite"),
        (OtherGains, r"it changes the initial value of \S+weight, which it shares"),
        (BreaksTheGraph, "it breaks the graph of torch.compile"),
        (NotInTheCheckpoint, "is something no parameter and no buffer"),
        (DislikesCompany, "with .*: ValueError: I was not first"),
        (Overwrites, "with .*: the order changes the gradients"),
    ],
)
def test_a_fault_is_named(cls: type, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=rf"^stabilizer mine: (?s:.*){sentence}"):
        check(cls, tmp_path)


@pytest.mark.slow
def test_it_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import stability_lab.testing"
    subprocess.run([sys.executable, "-c", code], check=True)
