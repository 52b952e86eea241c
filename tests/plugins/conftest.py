"""Packages of somebody else's, made on the spot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CODE = """
from dataclasses import dataclass
from typing import ClassVar

from stability_lab.seams import Scale, Seams, Site


@dataclass(frozen=True)
class Double:
    name: ClassVar[str] = "{name}"
    paper: ClassVar[str] = "arXiv:0000.00000"
    summary: ClassVar[str] = "logits times a factor, of a package of somebody else's"
    factor: float = 2.0

    def apply(self, seams: Seams) -> Seams:
        return seams.claim(self.name, logit_transform=self._transform)

    def _transform(self, site: Site) -> Scale:
        return Scale(self.factor)


@dataclass(frozen=True)
class NotOffered(Double):
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`package(name, installed=True)`: a package of one module, `name/double.py`, on sys.path; its folder.

    An installed one has metadata with an entry point and a folder of configs. Its import leaves a file `imported`.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    made = []

    def make(name: str, *, installed: bool = True) -> Path:
        made.append(name)
        folder = site / name
        (folder / "configs" / "stabilizer").mkdir(parents=True)
        mark = "from pathlib import Path\n(Path(__file__).parent / 'imported').touch()\n"
        (folder / "__init__.py").write_text(mark, encoding="utf-8")
        (folder / "double.py").write_text(CODE.replace("{name}", name), encoding="utf-8")
        (folder / "configs" / "stabilizer" / f"{name}.yaml").write_text(
            f"{name}:\n  _target_: {name}.double.Double\n  factor: 2.0\n", encoding="utf-8"
        )
        if installed:
            info = site / f"{name}-1.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n", encoding="utf-8")
            points = f"[stability_lab.stabilizers]\n{name} = {name}.double:Double\n"
            (info / "entry_points.txt").write_text(points, encoding="utf-8")
        return folder

    yield make
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[module]
