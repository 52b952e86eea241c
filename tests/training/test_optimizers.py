"""AdamW and SGD: what decays and by how much."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from stability_lab.build import check
from stability_lab.config import ConfigError, TrainConfig
from stability_lab.plugins.instantiate import instantiate
from stability_lab.training.loop import Run
from stability_lab.training.optimizers import AdamW, parameter_groups
from stability_lab.training.update import TorchUpdate

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
    decayed = {id(p) for p in groups_of(run)[0]["params"]}
    assert decayed == {id(p) for _, p in groups["decay"]}


def test_tied_head_is_an_embedding(tiny_run):
    groups = parameter_groups(tiny_run("model.tied_head=true").model)
    assert "embed.weight" in {name for name, _ in groups["no_decay"]}
    assert not [name for name, _ in groups["decay"] if "head" in name]


def groups_of(run: Run) -> list[dict[str, Any]]:
    assert isinstance(run.step.update, TorchUpdate)
    return run.step.update.groups


def adamw(config: TrainConfig, **options: float) -> AdamW:
    return dataclasses.replace(instantiate(config.optimizer, "optimizer"), **options)


def stepped(options: AdamW, lr: float, gradient: torch.Tensor) -> nn.Module:
    """A model whose weights were 1 after one step with the same gradient for every parameter."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))
    update = options.build(model)
    for p in model.parameters():
        nn.init.ones_(p)
        p.grad = gradient.expand_as(p).clone()
    update.step(lr, ONE, ZERO)
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
    options = adamw(tiny_config(*overrides))
    model = stepped(options, lr, ZERO)
    decayed = model[1].weight  # type: ignore[index]
    torch.testing.assert_close(decayed, torch.full((4, 4), 1 - shrinks_by(lr, options.lr)), rtol=1e-7, atol=0)
    assert model[0].weight.eq(1).all()  # type: ignore[index]
    assert model[1].bias.eq(1).all()  # type: ignore[index]


def test_first_step_of_adam_moves_by_the_learning_rate(tiny_config):
    options = adamw(tiny_config(), weight_decay=0.0)
    for parameter in stepped(options, 1e-3, torch.tensor(-7.0)).parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1.001), rtol=1e-6, atol=0)


def test_hyperparameters_reach_the_optimizer(tiny_run):
    run = tiny_run("optimizer.beta1=0.8", "optimizer.beta2=0.99", "optimizer.eps=1e-6")
    for group in groups_of(run):
        assert group["betas"] == (0.8, 0.99)
        assert group["eps"] == 1e-6


def test_gradients_are_divided_on_the_device(tiny_config):
    parameter, scaled = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for p, divisor in ((parameter, 1.0), (scaled, 8.0)):
        module = nn.Module()
        module.p = p
        update = adamw(tiny_config(), eps=1.0).build(module)
        p.grad = torch.tensor([1.0, -2.0, 3.0]) * divisor
        update.step(0.1, torch.tensor(divisor), ZERO)
    assert torch.equal(parameter, scaled)
    assert not parameter.eq(1).any()


@pytest.mark.oracle
@pytest.mark.parametrize("nesterov", ["false", "true"])
def test_sgd_is_torchs_behind_clipping(tiny_run, train_steps, nesterov):
    run = tiny_run("optimizer=sgd", "optimizer.lr=0.05", "trainer.grad_clip=0.5", f"optimizer.nesterov={nesterov}")
    plain = tiny_run("trainer.grad_clip=null")
    theirs = torch.optim.SGD(plain.model.parameters(), lr=0.0, momentum=0.9, nesterov=nesterov == "true")
    rows = train_steps(run, 4)
    for step, row in enumerate(rows, start=1):
        batch = plain.objective.batch(torch.from_numpy(plain.sampler.batch((step - 1) * 4, 4)), 0)
        theirs.zero_grad()
        plain.step.forward(batch, torch.tensor(1 / batch.targets_MT.numel()))[0].objective.backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        theirs.param_groups[0]["lr"] = run.schedule.lr(step)
        theirs.step()
        assert row["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert row["optim/clip_coef"] < 1
    for (name, a), b in zip(run.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("optimizer.beta1=1",), r"optimizer\.beta1=1: must be less than 1"),
        (("optimizer.lr=-1",), r"optimizer\.lr=-1: must be more than 0"),
        (("optimizer.beta3=1",), r"optimizer\.beta3 is not an option of optimizer: did you mean beta2\?"),
        (
            ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"),
            r"optimizer\.nesterov=True: needs a mom",
        ),
        (("optimizer=sgd", "optimizer.beta1=0.5"), r"optimizer\.beta1 is not an option of optimizer"),
        (("optimizer=adam",), r"optimizer=adam is not an option: did you mean adamw\?"),
        (("optimizer.weight_decay_mode=none",), r"optimizer\.weight_decay_mode=none: must be one of lr_scaled, indep"),
    ],
)
def test_wrong_options_are_one_sentence(words, sentence, tiny_config):
    with pytest.raises(ConfigError, match=sentence):
        check([tiny_config(*words)])
