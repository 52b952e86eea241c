"""A small reproduction that takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stability_lab.reproduction import catalogue

TINY_PARTS: Mapping[str, Any] = {
    "tiny": {
        "about": "what takes seconds",
        "sizes": {"cpu": ["scale=cpu", "model.n_layers=1", "data=synthetic", "trainer.eval_sequences=8"]},
        "default": ["norms"],
        "bundles": {"all": ["norms", "ladder"]},
        "parts": {
            "norms": {
                "question": "Are they the same?",
                "arms": {"layernorm": ["+stabilizer=none"], "rmsnorm": ["+stabilizer=rmsnorm"]},
                "injected": [25, 30],
                "show": ["grad_level", "log_injected_ratio"],
                "scales": {
                    "cpu": {
                        "overrides": [
                            *("+experiment=olmo2", "model.d_model=16", "model.seq_len=16"),
                            *("trainer.max_steps=40", "trainer.micro_batch_size=4"),
                        ],
                        "seeds": [0, 1],
                        "minutes": 1,
                        "workers": 1,
                    }
                },
            },
            "ladder": {
                "question": "How high?",
                "arms": {"none": ["+stabilizer=none"], "qknorm": ["+stabilizer=qknorm"]},
                "delta": 0.5,
                "pair": ["none", "qknorm"],
                "scales": {
                    "cpu": {
                        "overrides": [
                            *("+experiment=nvidia", "model.d_model=16", "model.seq_len=16"),
                            *("trainer.max_steps=20", "trainer.micro_batch_size=4"),
                        ],
                        "lrs": [0.003, 0.3],
                        "seeds": [0],
                        "minutes": 1,
                        "workers": 1,
                    }
                },
            },
        },
    }
}
TINY_CLAIMS = [
    {
        "id": "tiny-norms",
        "parts": ["norms"],
        "statement": "they are the same",
        "source": {"paper": "arXiv:0000.00000"},
        "values": {"loss": "the same"},
        "test": {"kind": "equivalence", "a": "rmsnorm", "b": "layernorm", "margin": 5},
        "caveats": ["a margin that nothing misses"],
    },
    {
        "id": "tiny-ladder",
        "parts": ["ladder"],
        "statement": "QK-norm lowers sensitivity",
        "source": {"text": "us"},
        "values": {"a|b": 0.5},
        "uncertainty": 0.1,
        "test": {"kind": "lr_sensitivity", "a": "qknorm", "b": "none", "direction": -1},
    },
    {
        "id": "tiny-later",
        "parts": ["ladder"],
        "statement": "something else",
        "source": {"text": "us"},
        "values": {"x": 1},
        "test": {"kind": "not_built"},
    },
]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The catalogue holds `tiny` alone, and the working directory is an empty one, which is returned."""
    data, work = tmp_path / "catalogue", tmp_path / "work"
    data.mkdir()
    work.mkdir()
    (data / "parts.yaml").write_text(yaml.safe_dump(dict(TINY_PARTS)), encoding="utf-8")
    (data / "published.yaml").write_text(yaml.safe_dump(TINY_CLAIMS), encoding="utf-8")
    monkeypatch.setattr(catalogue, "HERE", data)
    monkeypatch.chdir(work)
    for cached in (catalogue.reproductions, catalogue.claims):
        cached.cache_clear()
    yield work
    for cached in (catalogue.reproductions, catalogue.claims):
        cached.cache_clear()
