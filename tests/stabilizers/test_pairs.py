"""Every pair of stabilizers trains, or is refused with both names and the seam; the order never matters."""

import itertools
import math

import pytest
import torch

from stability_lab.build import build_model, build_stabilizers, fill_seams
from stability_lab.config import ConfigError, config_dir
from stability_lab.model.init import initialise
from stability_lab.seams import EXCLUSIVE, SeamConflict, Seams, Stabilizer
from stability_lab.training.step import forward_loss

NAMES = sorted(p.stem for p in (config_dir() / "stabilizer").glob("*.yaml") if p.stem != "none")
PAIRS = list(itertools.combinations(NAMES, 2))


def shared_exclusive_seams(built: list[Stabilizer]) -> set[str]:
    first, second = (set(s.apply(Seams()).owners) for s in built)
    return first & second & set(EXCLUSIVE)


def gradients(config, seams: Seams) -> dict[str, torch.Tensor]:
    """Loss and gradients of fixed tokens in a model with these seams."""
    model = build_model(config, 257, seams)
    initialise(model, 0)
    tokens = torch.arange(34).view(2, 17)
    loss = forward_loss(model, list(seams.loss_terms.values()))
    objective = loss(tokens[:, :-1], tokens[:, 1:], torch.tensor(1 / 32))[0].objective
    objective.backward()
    return {"loss": objective} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pair(a, b, tiny_config, tiny_run, train_steps):
    forth, back = f"+stabilizer=[{a},{b}]", f"+stabilizer=[{b},{a}]"
    config = tiny_config(forth)
    built = build_stabilizers(config)
    assert [s.name for s in built] == [a, b]
    assert sorted(tiny_config(back).stabilizer) == [a, b]
    contested = shared_exclusive_seams(built)
    if contested:
        messages = set()
        for first, second in (built, built[::-1]):
            with pytest.raises(SeamConflict) as conflict:
                second.apply(first.apply(Seams()))
            messages.add(str(conflict.value))
        assert len(messages) == 1
        (message,) = messages
        assert a in message
        assert b in message
        assert any(f"'{seam}'" in message for seam in contested)
        for overrides in (forth, back):
            with pytest.raises(ConfigError, match=rf"^stabilizer=\[{a},{b}\]: ") as refused:
                fill_seams(build_stabilizers(tiny_config(overrides)))
            assert message in str(refused.value)
        return
    one, other = built[1].apply(built[0].apply(Seams())), built[0].apply(built[1].apply(Seams()))
    assert one.owners == other.owners
    results = [gradients(config, seams) for seams in (one, other)]
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
    (row,) = train_steps(tiny_run(forth), 1)
    assert all(math.isfinite(value) for value in row.values())
    assert row["bad"] == 0
    assert train_steps(tiny_run(back), 1) == [row]


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
