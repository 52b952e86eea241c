"""Masks: their statistics, what they depend on, and what a batch of them is."""

import math

import numpy as np
import pytest
import torch

from stability_lab.build import build_objective, build_run, load_data
from stability_lab.config import ConfigError
from stability_lab.data.loader import _mix
from stability_lab.objective.loss import IGNORE
from stability_lab.objective.masked_lm import MaskedLM, MaskedLMNextSentence, MaskedText
from stability_lab.objective.masking import mixed, uniform, word_starts
from stability_lab.objective.objective import VALIDATION, Vocabulary
from stability_lab.training.loop import Loop

EOS, CLS, SEP, MASK = 20, 21, 22, 23
VOCABULARY = Vocabulary(25, (EOS, CLS, SEP, MASK, 24), CLS, SEP, MASK)
T = 32
ENCODER = ("model=bert_mini", "model.dropout=0.1", "objective=masked_lm")


@pytest.fixture(scope="module")
def windows():
    return torch.from_numpy(np.random.default_rng(0).integers(0, EOS + 1, (10_000, T + 1)))


def test_the_hash_is_that_of_the_loader():
    numbers = np.array([0, 1, 2, 2**40, 2**63 + 5, 2**64 - 1], dtype=np.uint64)
    np.testing.assert_array_equal(
        mixed(torch.from_numpy(numbers.view(np.int64))).numpy().view(np.uint64), _mix(numbers)
    )


def test_draws_are_uniform():
    draws = uniform(torch.arange(1000), 1000).flatten()
    assert 0 <= draws.min() < draws.max() < 1
    counts = torch.histc(draws, 20, 0, 1)
    assert ((counts - 5e4).square() / 5e4).sum() < 45  # chi-squared with 19 degrees of freedom: 43.8 at 0.001


def test_statistics_over_10_000_samples(windows):
    batch = MaskedLM().bound(VOCABULARY, 0).batch(windows, 0)
    text, inputs, targets = windows[:, :-3], batch.inputs_MT[:, 1:-1], batch.targets_MT[:, 1:-1]
    chosen, open_to_choice = targets != IGNORE, text != EOS
    n = int(chosen.sum())

    def near(count: torch.Tensor, p: float, total: int) -> bool:
        return abs(count.item() - p * total) < 4 * math.sqrt(p * (1 - p) * total)

    assert near(chosen.sum(), 0.15, int(open_to_choice.sum()))
    assert near((inputs[chosen] == MASK).sum(), 0.8, n)
    kept = inputs[chosen] == text[chosen]
    assert near(kept.sum(), 0.1 + 0.1 / 20, n)  # one in 20 of the drawn ids is the one that was there
    other = inputs[chosen & (inputs != MASK) & (inputs != text)]
    counts = torch.bincount(other, minlength=25)
    assert counts[20:].sum() == 0  # no reserved id is drawn
    assert ((counts[:20] - len(other) / 20).square() / (len(other) / 20)).sum() < 44
    assert torch.equal(targets[chosen], text[chosen])
    assert torch.equal(inputs[~chosen], text[~chosen])
    assert (batch.inputs_MT[:, 0] == CLS).all()
    assert (batch.inputs_MT[:, -1] == SEP).all()
    assert (batch.targets_MT[:, [0, -1]] == IGNORE).all()
    per_place = chosen.float().mean(0)
    assert (per_place - per_place.mean()).abs().max() < 4 * math.sqrt(0.15 * 0.85 / 10_000)


def test_pairs_over_10_000_samples(windows):
    pairs = torch.cat([windows, windows.roll(1, 0)], 1)
    batch = MaskedLMNextSentence().bound(VOCABULARY, 0).batch(pairs, 0)
    assert batch.labels_M is not None
    assert abs(batch.labels_M.float().mean().item() - 0.5) < 0.02
    whole = torch.where(batch.targets_MT == IGNORE, batch.inputs_MT, batch.targets_MT)
    a = (T - 3) // 2
    assert whole.shape == (10_000, T)
    assert torch.equal(whole[:, 1 : 1 + a], windows[:, :a])
    follows = batch.labels_M == 0
    assert torch.equal(whole[follows, a + 2 : -1], windows[follows, a : T - 3])
    assert torch.equal(whole[~follows, a + 2 : -1], windows.roll(1, 0)[~follows, a : T - 3])
    assert (whole[:, [0, a + 1, -1]] == torch.tensor([CLS, SEP, SEP])).all()
    assert batch.segments_MT is not None
    assert batch.segments_MT[0].tolist() == [0] * (a + 2) + [1] * (T - a - 2)


@pytest.mark.parametrize("options", [MaskedLM(), MaskedLM(static=True), MaskedLMNextSentence()], ids=str)
def test_what_is_drawn_depends_on_seed_and_number_alone(windows, options):
    rows = windows[:64].view(-1, (T + 1) * options.traits.windows)
    objective = options.bound(VOCABULARY, 7)
    whole = objective.batch(rows, 100)
    apart = [objective.batch(rows[i : i + 1], 100 + i) for i in range(len(rows))]
    for name in ("inputs_MT", "targets_MT", "segments_MT"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(one, name) for one in apart]))
    assert not torch.equal(whole.targets_MT, options.bound(VOCABULARY, 8).batch(rows, 100).targets_MT)
    next_epoch = torch.equal(whole.targets_MT, objective.batch(rows, 1000).targets_MT)
    assert next_epoch == getattr(options, "static", False)
    fixed = [options.bound(VOCABULARY, seed).batch(rows, VALIDATION).targets_MT for seed in (7, 8)]
    assert torch.equal(*fixed)


def test_whole_words_are_masked_whole():
    goes_on = torch.zeros(25, dtype=torch.bool)
    goes_on[10:20] = True  # these ids go on with a word, behind any other
    vocabulary = VOCABULARY._replace(continues_V=goes_on, continued_V=torch.ones(25, dtype=torch.bool))
    assert word_starts(torch.tensor([[1, 11, 12, 2, 3, 13]]), vocabulary).tolist() == [[0, 0, 0, 3, 4, 4]]
    text = torch.from_numpy(np.random.default_rng(1).integers(0, 20, (2000, T + 1)))
    targets = MaskedLM(whole_words=True).bound(vocabulary, 0).batch(text, 0).targets_MT[:, 1:-1]
    chosen, starts = targets != IGNORE, word_starts(text[:, :-3], vocabulary)
    first = starts > 0  # the first word of a window may go on behind [CLS]
    assert torch.equal(chosen[first], chosen.gather(1, starts)[first])
    assert abs(chosen.float().mean().item() - 0.15) < 0.01


def test_bytes_of_a_word_are_letters_and_digits(tiny_config):
    config = tiny_config(*ENCODER, "objective.whole_words=true")
    objective = build_objective(config, load_data(config))
    assert isinstance(objective, MaskedText)
    vocabulary = objective.masking.vocabulary
    text = b"It's 1st: caf\xc3\xa9 ok"
    starts = word_starts(torch.tensor([list(text)]), vocabulary)[0]
    words = [text[a:b] for a, b in zip(starts.unique(), [*starts.unique()[1:], len(text)], strict=True)]
    assert b"|".join(words) == b"It|'|s| |1st|:| |caf\xc3\xa9| |ok"


def test_ids_without_a_text_have_no_words(tiny_config):
    config = tiny_config(*ENCODER, "objective.whole_words=true", "data=synthetic")
    with pytest.raises(ConfigError, match=r"^objective\.whole_words=true: the ids of this data have no known text"):
        build_objective(config, load_data(config))


@pytest.mark.parametrize("name", ["masked_lm", "masked_lm_nsp"])
def test_only_masked_positions_count(tiny_run, name):
    """Loss, z-loss and statistics of log Z."""
    run = tiny_run(*ENCODER[:-1], f"objective={name}", "+stabilizer=zloss", "model.dropout=0", "data=synthetic")
    batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0)
    row = dict(zip(run.step.columns, run.step(batch, 0.0).tolist(), strict=True))
    with torch.no_grad():
        output = run.model(batch.inputs_MT, batch.segments_MT)
    masked = batch.targets_MT != IGNORE
    logits = output.logits_BTV[masked]
    ce = torch.nn.functional.cross_entropy(logits, batch.targets_MT[masked])
    assert row["train/loss"] == pytest.approx(ce.item(), rel=1e-5)
    assert row["train/z_raw"] == pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-5)
    assert row["train/z_loss"] == pytest.approx(1e-4 * row["train/z_raw"], rel=1e-5)
    if name == "masked_lm_nsp":
        nsp = torch.nn.functional.cross_entropy(output.classes_BC, batch.labels_M)
        assert row["train/nsp_loss"] == pytest.approx(nsp.item(), rel=1e-5)
        assert row["train/nsp_accuracy"] == (output.classes_BC.argmax(-1) == batch.labels_M).float().mean().item()


def test_samples_without_a_loss_have_no_label(windows):
    pairs = windows[:8].view(4, -1)
    batch = (
        MaskedLMNextSentence().bound(VOCABULARY, 0).batch(pairs, 0).without(torch.tensor([True, False, False, True]))
    )
    assert batch.weights_M is not None
    assert batch.weights_M.tolist() == [0, 1, 1, 0]
    assert (batch.targets_MT[[0, 3]] == IGNORE).all()


def test_accumulation_changes_neither_loss_nor_accuracy(tiny_run):
    words = ("model=bert_mini", "objective=masked_lm_nsp", "model.dropout=0", "data=synthetic")
    rows = []
    for split in (("trainer.micro_batch_size=4",), ("trainer.micro_batch_size=1", "trainer.grad_accum_steps=4")):
        run = tiny_run(*words, *split)
        batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, 4)), 0)
        rows.append(run.step(batch, 1e-3)[: run.step.columns.index("attn/logit_bound")])
    torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-6)


class Kept:
    def __init__(self):
        self.all = []

    def rows(self, rows):
        self.all += rows

    def event(self, event):
        pass


def test_a_run_names_its_perplexity_and_logs_the_accuracy(tiny_run):
    run = tiny_run("model=bert_mini", "objective=masked_lm_nsp", "data=synthetic", "trainer.max_steps=2")
    sink = Kept()
    loop = Loop(run, sink)
    loop.train()
    row = sink.all[-1]
    assert row["train/masked_ppl"] == math.exp(row["train/loss"])
    assert row["val/masked_ppl"] == pytest.approx(math.exp(row["val/loss"]))
    assert {"train/nsp_accuracy", "val/nsp_accuracy", "val/nsp_loss"} <= row.keys()
    assert not {"train/ppl", "val/ppl", "val/bits_per_byte"} & row.keys()
    summary = loop.judge()[1]
    assert set(summary["best"]) == {"val/loss", "val/masked_ppl", "step"}
    assert "train/masked_ppl" in summary["final"]


def test_a_resumed_run_goes_on_bit_for_bit(tiny_run):
    """With dropout, whose random numbers are in the state."""
    words = (*ENCODER, "data=synthetic", "trainer.max_steps=4", "trainer.log_every=1")
    whole = Loop(tiny_run(*words), Kept())
    whole.train()
    first = Loop(tiny_run(*words), Kept())
    first.interrupted = lambda: first.watch.n == 1
    first.train()
    state = first.state()
    torch.manual_seed(99)
    second = Loop(tiny_run(*words), Kept())
    second.load_state(state)
    second.train()
    for name, parameter in whole.run.model.named_parameters():
        assert torch.equal(parameter, second.run.model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=bert_mini",), r"^objective=causal_lm: model=bert_mini sees the ids that are to be predicted; use"),
        (("objective=masked_lm",), r"^objective=masked_lm: model=gpt_nano sees only what lies before a masked id; use"),
        (
            ("model=bert_mini", "objective=masked_lm_nsp", "sampling.mask_documents=true"),
            r"^sampling.mask_documents=true: this objective compares two texts",
        ),
        (("model=bert_mini", "objective=masked_lm", "+stabilizer=ln_scaling"), r"model\.norm_placement=pre"),
        (
            ("model=bert_mini", "objective=masked_lm", "model.vocab_size=258"),
            r"^model.vocab_size=258: must be at least",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_config, words, message):
    with pytest.raises(ConfigError, match=message):
        build_run(tiny_config(*words))
