"""AdamW: what decays and by how much, and an update that can be called off."""

import dataclasses

import pytest
import torch
from torch import nn

from stability_lab.training.optimizers import build_adamw, guarded_step, parameter_groups

ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def test_only_matrices_of_linear_layers_decay(tiny_run):
    run = tiny_run("+stabilizer=[qknorm,rmsnorm]", "model.bias=true", "model.positions=learned", "model.mlp=swiglu")
    groups = {group: {name for name, _ in members} for group, members in parameter_groups(run.model).items()}
    layers = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_up", "mlp.w_gate", "mlp.w_down")
    matrices = {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers} | {"head.weight"}
    assert groups["decay"] == matrices
    assert groups["no_decay"] == {name for name, _ in run.model.named_parameters()} - matrices
    assert {"embed.weight", "embed_positions.weight", "blocks.0.attn.wq.bias"} <= groups["no_decay"]


def test_gain_of_two_dimensions_does_not_decay():
    class Gains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4, 1, 8))
            self.linear = nn.Linear(8, 8)

    groups = parameter_groups(Gains())
    assert [name for name, _ in groups["decay"]] == ["linear.weight"]
    assert [name for name, _ in groups["no_decay"]] == ["gain", "linear.bias"]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_embeddings_decay_where_asked_for(tiny_run, tied):
    run = tiny_run("model.positions=learned", f"model.tied_head={tied}", "optimizer.decay_embeddings=true")
    groups = parameter_groups(run.model, decay_embeddings=True)
    names = {group: {name for name, _ in members} for group, members in groups.items()}
    assert {"embed.weight", "embed_positions.weight"} <= names["decay"]
    assert names["no_decay"] == {name for name, p in run.model.named_parameters() if p.ndim == 1}
    decayed = {id(p) for p in run.step.optimizer.param_groups[0]["params"]}
    assert decayed == {id(p) for _, p in groups["decay"]}


def test_tied_head_is_an_embedding(tiny_run):
    groups = parameter_groups(tiny_run("model.tied_head=true").model)
    assert "embed.weight" in {name for name, _ in groups["no_decay"]}
    assert not [name for name, _ in groups["decay"] if "head" in name]


def stepped(config, lr: float, gradient: torch.Tensor) -> nn.Module:
    """A model whose weights were 1 after one step with the same gradient for every parameter."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))
    optimizer = build_adamw(model, config)
    for p in model.parameters():
        nn.init.ones_(p)
        p.grad = gradient.expand_as(p).clone()
    guarded_step(optimizer, lr, ONE, ZERO)
    return model


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
@pytest.mark.parametrize(
    ("overrides", "shrinks_by"),
    [
        ((), lambda lr, peak: lr * 0.1),
        (("optimizer.weight_decay=0.5",), lambda lr, peak: lr * 0.5),
        (("optimizer.weight_decay_mode=independent",), lambda lr, peak: 1e-4 * lr / peak),
        (
            ("optimizer.weight_decay_mode=independent", "optimizer.independent_weight_decay=0.02", "optimizer.lr=0.1"),
            lambda lr, peak: 0.02 * lr / peak,
        ),
    ],
    ids=["lr_scaled", "lr_scaled 0.5", "independent", "independent 0.02"],
)
def test_decay_of_one_step_without_gradient(tiny_config, overrides, shrinks_by, lr):
    config = tiny_config(*overrides).optimizer
    model = stepped(config, lr, ZERO)
    decayed = model[1].weight  # type: ignore[index]
    torch.testing.assert_close(decayed, torch.full((4, 4), 1 - shrinks_by(lr, config.lr)), rtol=1e-7, atol=0)
    assert model[0].weight.eq(1).all()  # type: ignore[index]
    assert model[1].bias.eq(1).all()  # type: ignore[index]


def test_first_step_of_adam_moves_by_the_learning_rate(tiny_config):
    config = dataclasses.replace(tiny_config().optimizer, weight_decay=0.0)
    for parameter in stepped(config, 1e-3, torch.tensor(-7.0)).parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1.001), rtol=1e-6, atol=0)


def test_hyperparameters_reach_the_optimizer(tiny_run):
    run = tiny_run("optimizer.beta1=0.8", "optimizer.beta2=0.99", "optimizer.eps=1e-6")
    for group in run.step.optimizer.param_groups:
        assert group["betas"] == (0.8, 0.99)
        assert group["eps"] == 1e-6
        assert group["fused"]


def test_gradients_are_divided_on_the_device(tiny_config):
    parameter, scaled = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for p, divisor in ((parameter, 1.0), (scaled, 8.0)):
        module = nn.Module()
        module.p = p
        optimizer = build_adamw(module, dataclasses.replace(tiny_config().optimizer, eps=1.0))
        p.grad = torch.tensor([1.0, -2.0, 3.0]) * divisor
        guarded_step(optimizer, 0.1, torch.tensor(divisor), ZERO)
    assert torch.equal(parameter, scaled)
    assert not parameter.eq(1).any()


def test_called_off_update_changes_nothing(tiny_config):
    module = nn.Linear(4, 4)
    optimizer = build_adamw(module, tiny_config().optimizer)

    def update(gradient: float, call_off: torch.Tensor) -> list[torch.Tensor]:
        for p in module.parameters():
            p.grad = torch.full_like(p, gradient)
        guarded_step(optimizer, 0.1, ONE, call_off)
        state = [value for p in module.parameters() for value in optimizer.state[p].values()]
        return [value.detach().clone() for value in (*module.parameters(), *state)]

    before = update(1.0, ZERO)
    for gradient in (1.0, float("nan"), float("inf")):
        after = update(gradient, ONE)
        assert len(after) == 2 + 2 * 3
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), gradient
    assert not torch.equal(before[0], update(1.0, ZERO)[0])
