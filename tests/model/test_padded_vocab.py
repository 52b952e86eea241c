"""Rows that only pad the vocabulary change nothing: no logit comes from them, and they stay 0."""

import dataclasses

import pytest
import torch
from torch import Tensor

from stability_lab.build import build_run
from stability_lab.model.transformer import GPT
from stability_lab.seams import Seams
from stability_lab.training.loop import Run

V, PADDED = 257, 300
SET = ("+stabilizer=[zloss,final_softcap]", "stabilizer.zloss.weight=1e-2", "model.init.std=0.3")


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, tiny_config) -> tuple[Run, Run]:
    """The same run without and with padding; tests of this module must not train it."""
    return build(tiny_config, request.param)


def build(tiny_config, head: str) -> tuple[Run, Run]:
    config = tiny_config(*SET, f"model.tied_head={str(head == 'tied').lower()}")
    padded = dataclasses.replace(config, model=dataclasses.replace(config.model, pad_vocab_to=PADDED))
    return build_run(config), build_run(padded)


def outcome(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Logits and loss sums of the first batch, and the gradients."""
    tokens = torch.from_numpy(run.sampler.batch(0, 4))
    run.model.zero_grad()
    sums, _ = run.step.forward(run.objective.batch(tokens, 0), torch.tensor(1 / 64))
    sums.objective.backward()
    with torch.no_grad():
        logits = run.model(tokens[:, :-1]).logits_BTV
    values = {"logits": logits, **sums._replace(terms=sums.terms[0])._asdict()}
    values = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    return values, {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}


def rows_of_the_vocabulary(model: GPT) -> list[str]:
    return ["embed.weight"] if model.head is None else ["embed.weight", "head.weight"]


def test_shapes(pair):
    plain, padded = pair
    for name in rows_of_the_vocabulary(padded.model):
        assert plain.model.get_parameter(name).shape == (V, 32)
        assert padded.model.get_parameter(name).shape == (PADDED, 32)
    assert padded.model(torch.zeros(1, 3, dtype=torch.int64)).logits_BTV.shape == (1, 3, V)


def test_initial_values_of_the_real_rows_are_the_same(pair):
    plain, padded = pair
    for name, parameter in plain.model.named_parameters():
        other = padded.model.get_parameter(name)
        if name in rows_of_the_vocabulary(padded.model):
            assert other[V:].eq(0).all(), name
            other = other[:V]
        assert torch.equal(parameter, other), name


def test_logits_loss_and_gradients_are_the_same(pair):
    plain, padded = pair
    (values, gradients), (values_p, gradients_p) = outcome(plain), outcome(padded)
    assert values["terms"] > 0
    assert values.keys() == values_p.keys()
    for name, value in values.items():
        assert torch.equal(value, values_p[name]), name
    assert gradients.keys() == gradients_p.keys()
    for name, gradient in gradients.items():
        other = gradients_p[name]
        if name in rows_of_the_vocabulary(padded.model):
            assert other[V:].eq(0).all(), name
            other = other[:V]
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6 * gradient.abs().max().item())


def test_probabilities_of_the_real_tokens_add_up_to_one(pair):
    _, padded = pair
    with torch.no_grad():
        logits = padded.model(torch.arange(16)[None]).logits_BTV
        # With columns of logit 0 in the sum, log Z would be larger.
        assert torch.cat((logits, torch.zeros(1, 16, PADDED - V)), -1).logsumexp(-1).gt(logits.logsumexp(-1)).all()
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(1, 16))


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_training_leaves_the_padding_at_zero_and_gives_the_same_steps(tiny_config, train_steps, head):
    plain, padded = build(tiny_config, head)
    for row, other in zip(train_steps(plain, 3), train_steps(padded, 3), strict=True):
        for name in ("train/loss", "train/z_raw", "train/log_z_max", "optim/grad_norm"):
            assert other[name] == pytest.approx(row[name], rel=1e-5), name
    for name in rows_of_the_vocabulary(padded.model):
        assert padded.model.get_parameter(name)[V:].eq(0).all(), name


def test_a_multiple_that_is_reached_already_adds_nothing(tiny_config):
    config = dataclasses.replace(tiny_config().model, vocab_size=V, pad_vocab_to=V)
    assert GPT(config, Seams()).embed.weight.shape == (V, 32)
