"""Every pair of stabilizers trains, or is refused with both names and the seam; the order never matters."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import yaml

from stability_lab.build import build_model, build_run, build_stabilizers, build_step, fill_seams
from stability_lab.config import ConfigError, TrainConfig, config_dir
from stability_lab.model.init import initialise
from stability_lab.seams import EXCLUSIVE, SeamConflict, Seams

FOLDER = config_dir() / "stabilizer"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "none")
PAIRS = list(itertools.combinations(NAMES, 2))


def config_with(base: TrainConfig, *names: str) -> TrainConfig:
    """`base` with these stabilizers, in this order (through Hydra 78 pairs would take half a minute)."""
    nodes: dict[str, Any] = {}
    for name in names:
        nodes |= yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return dataclasses.replace(base, stabilizer=nodes)


def outcome(config: TrainConfig, seams: Seams) -> dict[str, torch.Tensor]:
    """Loss and gradients of fixed tokens in a model with these seams."""
    model = build_model(config, 257, seams)
    initialise(model, 0)
    step = build_step(config, model)
    batch = step.objective.batch(torch.arange(34).view(2, 17), 0)
    objective = step.forward(batch, torch.tensor(1 / 32))[0].objective
    objective.backward()
    return {"loss": objective} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def refusal(config: TrainConfig) -> str | None:
    """Why this configuration cannot be built; None where it can."""
    try:
        with torch.device("meta"):
            build_model(config, 257, fill_seams(build_stabilizers(config)))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pair(a, b, tiny_config, train_steps):
    forth, back = config_with(tiny_config(), a, b), config_with(tiny_config(), b, a)
    built = build_stabilizers(forth)
    assert [s.name for s in built] == [s.name for s in build_stabilizers(back)] == [a, b]
    contested = set(built[0].apply(Seams()).owners) & set(built[1].apply(Seams()).owners) & set(EXCLUSIVE)
    message = refusal(forth)
    assert refusal(back) == message
    if contested:
        assert message is not None
        for first, second in (built, built[::-1]):
            with pytest.raises(SeamConflict) as conflict:
                second.apply(first.apply(Seams()))
            assert message == f"stabilizer=[{a},{b}]: {conflict.value}"
    if message is not None:
        assert message.startswith(f"stabilizer=[{a},{b}]: stabilizer")
        reason = message.partition(": ")[2]
        assert a in reason
        assert b in reason
        assert any(f"'{seam}'" in reason for seam in contested or EXCLUSIVE)
        return
    one, other = built[1].apply(built[0].apply(Seams())), built[0].apply(built[1].apply(Seams()))
    assert one.owners == other.owners
    results = [outcome(forth, seams) for seams in (one, other)]
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    (row,) = train_steps(build_run(forth), 1)
    assert all(math.isfinite(value) for value in row.values())
    assert row["bad"] == 0


def test_the_pair_of_norms_is_refused(tiny_config):
    assert ("layernorm", "rmsnorm") in PAIRS
    with pytest.raises(ConfigError, match="stabilizers layernorm and rmsnorm both claim the exclusive seam 'norm'"):
        fill_seams(build_stabilizers(tiny_config("+stabilizer=[rmsnorm,layernorm]")))


def test_unknown_seam_is_a_programming_error():
    with pytest.raises(TypeError, match="someone claims an unknown seam 'nrom'"):
        Seams().claim("someone", nrom=None)


def test_additive_seams_hold_several_in_the_order_of_their_names():
    seams = Seams().claim("zz", loss_terms="second").claim("aa", loss_terms="first")
    assert list(seams.loss_terms.items()) == [("aa", "first"), ("zz", "second")]
    assert seams.owners == {"loss_terms": ("aa", "zz")}
    assert Seams().owners == {}
