"""Run directories made by hand, as `train` leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

MakeRun = Callable[..., Path]


def spike_score(spikes: int, scored: int) -> dict[str, Any]:
    score = 100 * spikes / scored if scored else None
    return {"score": score, "n_spikes": spikes if scored else None, "n_scored": scored}


def write_run(
    folder: Path,
    stabilizers: Mapping[str, Mapping[str, Any]] | Sequence[str] = (),
    lr: float = 3e-3,
    seed: int = 0,
    loss: float | None = 2.0,
    *,
    config: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    final: Mapping[str, Any] | None = None,
    **summary: Any,
) -> Path:
    folder.mkdir(parents=True)
    options = stabilizers if isinstance(stabilizers, Mapping) else {name: {} for name in stabilizers}
    made_config = {
        "seed": seed,
        "init_seed": None,
        "data_seed": None,
        "optimizer": {"lr": lr, "eps": 1e-8},
        "stabilizer": {name: {"_target_": f"x.{name}", **values} for name, values in options.items()},
        "tracking": {"mode": "disabled"},
        "output_dir": str(folder.parent),
        **(config or {}),
    }
    overrides = [f"+stabilizer=[{','.join(options)}]" if options else "+stabilizer=none"]
    made_manifest = {
        "created": f"2026-01-01T00:00:{seed:02d}+00:00",
        "group": folder.parent.name,
        "overrides": [*overrides, f"++optimizer.lr={lr:g}", f"++seed={seed}", "++trainer.max_steps=300"],
        "stabilizers": sorted(options),
        "versions": {"torch": "2.13.0", "stability_lab": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"},
        "git": {"revision": "0" * 40, "dirty": False},
        "device": "cpu",
        "platform": "Linux-6",
        "deterministic": False,
        "threads": 2,
        "training_bytes": 16_000_000,
        "precision": "fp32",
        "compile": "off",
        "implementation": "fused",
        "attention": {"backend": "sdpa"},
        "data": {
            "fingerprint": "d" * 64,
            "first_batch": f"first{seed}",
            "last_batch": f"last{seed}",
            "validation": "v" * 16,
        },
        "init": {"embed.weight": f"e{seed}", **{f"{name}.gain": "ones" for name in options}},
        **(manifest or {}),
    }
    values = {} if loss is None else {"val/loss": loss, "train/loss": loss + 0.01}
    made_summary = {
        "status": "completed",
        "verdict": "stable",
        "steps": 300,
        "initial": {"val/loss": 5.5},
        "final": {**values, **(final or {})},
        "best": {} if loss is None else {"val/loss": loss - 0.01, "step": 250},
        "max_attn_logit": 10.0,
        "clip_fraction": 0.1,
        "tokens_per_s": 1000.0,
        "perf/peak_memory_bytes": 5e8,
        "events": {},
        "scores": {
            signal: {"olmo2": spike_score(0, 0), "olmo_core": spike_score(1, 172), "robust": spike_score(2, 280)}
            for signal in ("grad_norm", "loss")
        },
        **summary,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(made_config), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(made_manifest), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(made_summary), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(name, stabilizers, lr, seed, loss, ...)`: a finished run in tmp_path/sweep/name."""
    return lambda name, *arguments, **values: write_run(tmp_path / "sweep" / name, *arguments, **values)
