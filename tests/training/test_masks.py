"""No loss on repetitive sequences, and the same gradients however the rest is cut into micro-batches."""

import pytest
import torch

from stability_lab.data.repeats import repetitive

LONG = ("model.seq_len=64", "sampling.mask_repeats=true")


@pytest.fixture
def some_repetitive(tmp_path):
    """Text of which about a third is one word over and over."""
    parts = (f"line {i} of some text that goes on, number {i * i}\n" + ("ab" * 80 if i % 2 else "") for i in range(999))
    path = tmp_path / "text.txt"
    path.write_text("".join(parts))
    return ("data=text", f"data.path={path}")


def test_a_bad_batch_teaches_nothing(trained) -> None:
    """`bad_batch` fills every sequence with 4 tokens over and over, 32 times in 128, so the step has no target left."""
    result = trained("model.seq_len=128", "sampling.mask_repeats=true", "debug.inject=bad_batch@3")
    assert [row["train/masked_sequences"] for row in result.sink.seen] == [0, 0, 4, 0, 0]
    assert [row["train/loss"] is None for row in result.sink.seen] == [False, False, True, False, False]
    assert result.sink.seen[2]["optim/skipped"] == 1.0
    plain = trained("model.seq_len=128", "debug.inject=bad_batch@3")
    assert "train/masked_sequences" not in plain.sink.seen[2]
    assert plain.sink.seen[2]["train/loss"] is not None


def test_masked_sequences_are_those_that_repeat(trained, some_repetitive) -> None:
    result = trained(*LONG, *some_repetitive)
    batches = [result.run.sampler.batch(4 * step, 4) for step in range(5)]
    counts = [row["train/masked_sequences"] for row in result.sink.seen]
    assert counts == [repetitive(batch).sum() for batch in batches]
    assert 0 < sum(counts) < 20


def test_the_loss_is_that_of_the_other_sequences(trained, tiny_run, some_repetitive) -> None:
    words = (*LONG, *some_repetitive, "trainer.micro_batch_size=16", "trainer.max_steps=1")
    result, fresh = trained(*words), tiny_run(*words)
    batch = fresh.sampler.batch(0, 16)
    kept = torch.from_numpy(batch[~repetitive(batch)])
    assert 0 < len(kept) < 16
    with torch.no_grad():
        logits = fresh.model(kept[:, :-1]).logits_BTV
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept[:, 1:].flatten())
    assert result.steps[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_accumulation_changes_nothing(trained, some_repetitive) -> None:
    """Micro-batches hold different numbers of valid tokens; the loss is over those of the whole step."""
    one = trained(*LONG, *some_repetitive, "trainer.micro_batch_size=8")
    four = trained(*LONG, *some_repetitive, "trainer.micro_batch_size=2", "trainer.grad_accum_steps=4")
    for a, b in zip(one.steps, four.steps, strict=True):
        assert a["train/masked_sequences"] == b["train/masked_sequences"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-5)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)
    for (name, p), q in zip(one.run.model.named_parameters(), four.run.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


def test_without_repeats_the_option_changes_no_bit(trained) -> None:
    masked, plain = trained(*LONG), trained("model.seq_len=64")
    assert [row.pop("train/masked_sequences") for row in masked.steps] == [0] * 5
    assert masked.steps[0]["train/loss"] == plain.steps[0]["train/loss"]
    for p, q in zip(masked.run.model.parameters(), plain.run.model.parameters(), strict=True):
        assert torch.equal(p, q)
