"""Growth exponents against a model that is run by hand, and against a block whose growth is known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from stability_lab.build import build_model
from stability_lab.model.init import initialise
from stability_lab.reproduction.growth import SCHEMES, SEQ_LEN, VOCAB, exponents, growth
from stability_lab.seams import Seams


@pytest.fixture
def config(compose_config):
    return compose_config(
        "model.d_model=64", "model.n_heads=1", "model.n_layers=3", "model.seq_len=128", "tracking=local"
    )


def test_exponents_are_those_of_a_model_run_by_hand(config) -> None:
    model = build_model(config, VOCAB, Seams())
    initialise(model, 5)
    windows = torch.randint(256, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(5))
    x, streams = model.embed(windows[:, :-1]), []
    for block in model.blocks:
        x, _ = block(x)
        x.retain_grad()
        streams.append(x)
    assert model.head is not None
    logits = model.head(model.final_norm(x))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
    size = [stream.detach().norm(dim=-1).mean().item() for stream in streams]
    slope = [stream.grad.norm(dim=-1).mean().item() for stream in streams]
    found = exponents(config, 5, 2 * SEQ_LEN)
    assert found["activation"] == pytest.approx(math.log(size[2] / size[0]) / 2, rel=1e-5)
    assert found["gradient"] == pytest.approx(math.log(slope[0] / slope[2]) / 2, rel=1e-4)
    assert found["activation"] > 0


def test_the_branches_follow_the_rule_of_depth(compose_config) -> None:
    """Inputs of an MLP are normalised: what goes in does not grow, and what comes out is as large as w_down."""
    config = compose_config("model.d_model=256", "model.n_layers=3", "model.seq_len=128", "tracking=local")
    for scheme, expected in (("normal", 0.0), ("scaled", -math.log(3) / 2 / 2)):
        model = dataclasses.replace(config.model, vocab_size=VOCAB, init=SCHEMES[scheme])
        found = exponents(dataclasses.replace(config, model=model), 0, 8 * SEQ_LEN)
        assert found["w_up_activation"] == pytest.approx(0, abs=0.03)
        assert found["w_down_activation"] == pytest.approx(expected, abs=0.03)
        # w_down sees nearly the gradient of the stream, w_up that times w_down's weight.
        assert found["w_up_gradient"] - found["w_down_gradient"] == pytest.approx(-expected, abs=0.03)


def test_all_schemes_widths_and_seeds(config) -> None:
    found = growth(config, [64], 2, SEQ_LEN, [0, 1])
    names = {f"{kind}_{name}_64" for kind in ("activation", "gradient") for name in SCHEMES}
    inner = {f"{place}{name}" for place in ("w_up_", "w_down_") for name in names}
    assert set(found) == names | {f"abs_{name}" for name in names} | inner
    for name in names:
        values, sizes = found[name], found[f"abs_{name}"]
        assert isinstance(values, list)
        assert sizes == [abs(value) for value in values]
        assert len(set(values)) == 2, "seeds differ"
    assert found["activation_normal_64"] != found["activation_scaled_64"]
