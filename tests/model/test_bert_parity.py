"""An encoder with the weights of `BertForPreTraining` gives its logits, loss and gradients, and the other way round."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from stability_lab.build import build_model, build_stabilizers, fill_seams
from stability_lab.model.transformer import GPT
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.masked_lm import MaskedLMNextSentence
from stability_lab.objective.objective import Batch, Vocabulary
from stability_lab.training.step import forward_loss

pytestmark = pytest.mark.oracle

V, D, T, L, B = 65, 32, 16, 2, 3
NAMES = {
    "bert.embeddings.word_embeddings": "embed",
    "bert.embeddings.position_embeddings": "embed_positions",
    "bert.embeddings.token_type_embeddings": "embed_segments",
    "bert.embeddings.LayerNorm": "embed_norm",
    "attention.self.query": "attn.wq",
    "attention.self.key": "attn.wk",
    "attention.self.value": "attn.wv",
    "attention.output.dense": "attn.wo",
    "attention.output.LayerNorm": "attn_residual_norm",
    "intermediate.dense": "mlp.w_up",
    "output.dense": "mlp.w_down",
    "output.LayerNorm": "mlp_residual_norm",
    "bert.pooler.dense": "sequence_head.pooler",
    "cls.predictions.transform.dense": "head_transform.dense",
    "cls.predictions.transform.LayerNorm": "head_transform.norm",
    "cls.seq_relationship": "sequence_head.classifier",
}


def our_name(theirs: str) -> str:
    if theirs == "cls.predictions.bias":
        return "head_bias"
    module, _, kind = theirs.rpartition(".")
    layer = re.fullmatch(r"bert\.encoder\.layer\.(\d+)\.(.*)", module)
    return f"blocks.{layer[1]}.{NAMES[layer[2]]}.{kind}" if layer else f"{NAMES[module]}.{kind}"


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=L,
        num_attention_heads=4,
        intermediate_size=4 * D,
        max_position_embeddings=T,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-12,
        pad_token_id=None,  # else the row of id 0 gets no gradient from where it is read
    )
    config._attn_implementation = "eager"
    return BertForPreTraining(config)


def our_model(tiny_config, backend: str) -> GPT:
    like_bert = ("model=bert_mini", "objective=masked_lm_nsp", "model.dropout=0")
    norm = ("+stabilizer=layernorm", "stabilizer.layernorm.eps=1e-12")
    config = tiny_config(*like_bert, *norm, f"model.attention={backend}")
    return build_model(config, V, fill_seams(build_stabilizers(config)))


def randomise(model: torch.nn.Module) -> None:
    """Weights as far from initial ones as a trained model's."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        gain = parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.3)


def a_batch() -> tuple[Batch, Tensor]:
    """With padding behind the last sample's text."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    targets = torch.randint(0, V, (B, T), generator=generator)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[-1, 11:] = True
    hidden = (torch.rand(B, T, generator=generator) > 0.3) | padding
    segments = (torch.arange(T) > 8).long().expand(B, T)
    batch = Batch(
        tokens, targets.masked_fill(hidden, IGNORE), segments, torch.tensor([0, 1, 1]), torch.full((B,), 1 / B)
    )
    return batch, padding


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_loss_and_gradients_are_those_of_bert(tiny_config, theirs, backend):
    randomise(theirs)
    ours = our_model(tiny_config, backend)
    weights = {our_name(name): p for name, p in theirs.named_parameters()}
    ours.load_state_dict(weights, strict=True)
    batch, padding = a_batch()
    expected = theirs(
        batch.inputs_MT,
        token_type_ids=batch.segments_MT,
        attention_mask=(~padding).long(),
        labels=batch.targets_MT,
        next_sentence_label=batch.labels_M,
    )
    output = ours(batch.inputs_MT, batch.segments_MT, padding)
    seen = ~padding
    assert expected.prediction_logits[seen].std() > 0.5
    torch.testing.assert_close(output.logits_BTV[seen], expected.prediction_logits[seen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.classes_BC, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    objective = MaskedLMNextSentence().bound(Vocabulary(V, (), 0, 1, 2), 0)
    n = (batch.targets_MT != IGNORE).sum()
    sums = objective.loss(output, batch, 1 / n)
    assert sums.objective.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    sums.objective.backward()
    theirs.zero_grad()
    expected.loss.backward()
    gradients = {our_name(name): p.grad for name, p in theirs.named_parameters()}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        # A bias of the keys shifts all logits of a query alike: both have rounding only.
        size = largest / 10 if name.endswith("wk.bias") else gradients[name].abs().max().item()
        assert size > 0, name
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-4, atol=1e-5 * size, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bert_takes_our_weights(tiny_config, theirs):
    ours = our_model(tiny_config, "sdpa")
    randomise(ours)
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[our_name(name)])
    batch, _ = a_batch()
    expected = ours(batch.inputs_MT, batch.segments_MT)
    found = theirs(batch.inputs_MT, token_type_ids=batch.segments_MT)
    torch.testing.assert_close(found.prediction_logits, expected.logits_BTV, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, expected.classes_BC, rtol=1e-5, atol=1e-5)


def test_without_segments_all_tokens_are_in_the_first(tiny_config):
    ours = our_model(tiny_config, "sdpa")
    randomise(ours)
    batch, _ = a_batch()
    outputs = (ours(batch.inputs_MT).logits_BTV, ours(batch.inputs_MT, torch.zeros_like(batch.inputs_MT)).logits_BTV)
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_a_step_reads_segments_and_labels(tiny_run):
    run = tiny_run("model=bert_mini", "objective=masked_lm_nsp", "data=synthetic")
    windows = torch.from_numpy(run.sampler.batch(0, 4))
    batch = run.objective.batch(windows, 0)
    forward = forward_loss(run.model.eval(), run.objective, [])
    inv_n = 1 / (batch.targets_MT != IGNORE).sum()
    sums = [forward(changed, inv_n)[0].objective for changed in (batch, batch._replace(labels_M=1 - batch.labels_M))]
    assert sums[0] != sums[1]
    swapped = batch._replace(segments_MT=1 - batch.segments_MT)
    assert forward(swapped, inv_n)[0].ce != forward(batch, inv_n)[0].ce
