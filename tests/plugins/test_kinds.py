"""What an installed package may offer beside stabilizers: every open set that is trained with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from stability_lab.data.sources.synthetic import Copy
from stability_lab.data.tokenizer import ByteTokenizer
from stability_lab.objective.causal_lm import CausalLM
from stability_lab.training.optimizers import decay_groups
from stability_lab.training.update import SnapshotUpdate, Update


@dataclass(frozen=True)
class Averaged:
    name: ClassVar[str] = "averaged"
    state_bytes: ClassVar[int] = 8
    lr: float = 1e-3

    def build(self, model: nn.Module) -> Update:
        made = torch.optim.NAdam(decay_groups(model, 0.0, False), lr=self.lr)
        return SnapshotUpdate([made], model, self.lr)


@dataclass(frozen=True)
class Objective(CausalLM):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class Source(Copy):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True)
class Words(ByteTokenizer):
    pass
"""
OPTIONS = {
    "optimizers": ("optimizer", "Averaged", "lr: 1.0e-3\n"),
    "objectives": ("objective", "Objective", ""),
    "data": ("data", "Source", "symbols: 8\nlength: 4\ntokens: 20000\nval_tokens: 2000\nsource_seed: 0\n"),
    "tokenizers": ("tokenizer", "Words", ""),
}


@pytest.fixture
def offers(package: Callable[..., Path]) -> Path:
    folder = package("offers_all")
    (folder / "kinds.py").write_text(CODE, encoding="utf-8")
    points = ["[stability_lab.stabilizers]\noffers_all = offers_all.double:Double\n"]
    for kind, (group, cls, options) in OPTIONS.items():
        points.append(f"[stability_lab.{kind}]\nmine = offers_all.kinds:{cls}\n")
        (folder / "configs" / group).mkdir()
        text = f"_target_: offers_all.kinds.{cls}\n{options}"
        (folder / "configs" / group / "mine.yaml").write_text(text, encoding="utf-8")
    info = folder.parent / "offers_all-1.5.dist-info" / "entry_points.txt"
    info.write_text("\n".join(points), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_all_of_them_train_together_and_go_on(offers, run_command, tiny_overrides, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["+stabilizer=offers_all", *(f"{group}=mine" for group, _, _ in OPTIONS.values()), "run_name=one"]
    shown = run_command("train", *(word for word in tiny_overrides if "optimizer" not in word), *chosen)
    assert shown.code == 0, shown.out + shown.err
    run = tmp_path / "outputs" / "runs" / "one"
    manifest = json.loads((run / "manifest.json").read_text())
    classes = {f"offers_all.kinds.{cls}" for _, cls, _ in OPTIONS.values()}
    assert set(manifest["packages"]) == {"offers_all.double.Double", *classes}
    assert manifest["data"]["name"] == "mine"
    with (offers / "kinds.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    shown = run_command("train", f"resume={run}", "trainer.max_steps=7")
    assert shown.code == 0, shown.out + shown.err
    assert "the run goes on with stability_lab" in shown.out
    assert json.loads((run / "summary.json").read_text())["steps"] == 7
