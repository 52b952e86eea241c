"""What layers give, against a model that is run by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from stability_lab.build import build_model
from stability_lab.model.init import initialise
from stability_lab.reproduction import output_growth as module
from stability_lab.reproduction.output_growth import LAYERS, output_growth, output_sizes
from stability_lab.seams import Seams


def test_sizes_are_those_of_a_model_run_by_hand(compose_config) -> None:
    config = compose_config("model=gpt_pico", "model.n_layers=1", "tracking=local")
    model = build_model(config, 257, Seams())
    initialise(model, 3)
    windows = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(3))
    x = model.blocks[0].get_submodule("attn_norm")(model.embed(windows[:, :-1]))
    by_hand = [x @ model.get_parameter(f"blocks.0.attn.{name}.weight").T for name in ("wq", "wk", "wv")]
    expected = torch.stack(by_hand).norm(dim=-1).mean().log().item()
    found = output_sizes(model, windows)
    assert set(found) == set(LAYERS)
    assert found["qkv"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_both_runs_begin_alike_and_a_run_that_does_not_fail_is_left_out(compose_config, monkeypatch) -> None:
    words = ("data=synthetic", "model=gpt_pico", "model.seq_len=16", "schedule=ramp", "trainer.micro_batch_size=2")
    config = compose_config(*words, "optimizer.lr=1.0", "trainer.max_steps=30", "tracking=local", "trainer.device=cpu")
    assert output_growth(config, [0]) == {}
    monkeypatch.setattr(module, "LEVEL", 100.0)  # never left: the last row counts
    found = output_growth(config, [0])
    growth, diverging, converging = (np.array(found[f"fc2_{what}"]) for what in ("growth", "diverging", "converging"))
    assert growth.shape == (1,)
    assert growth == diverging - converging
    monkeypatch.setattr(module, "CONVERGES", 1.0)
    same = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, name="constant"))
    np.testing.assert_allclose(output_growth(same, [0])["qkv_growth"], 0, atol=1e-9)
