"""Head and loss in chunks of samples: the sums and gradients of the plain path, and where that path is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stability_lab.diagnostics.probe import validate
from stability_lab.machine.precision import autocast
from stability_lab.training import chunked_loss

CASES = {
    "z-loss, tied": ("+stabilizer=zloss", "stabilizer.zloss.weight=1e-2", "model.tied_head=true"),
    "final soft-cap, padded, untied": ("+stabilizer=final_softcap", "model.pad_vocab_to=320"),
    "bf16, given targets": ("trainer.precision=bf16", "objective.prompt=3"),
}


def outcome(run: Any, batch: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inv_n = 1 / (batch.targets_MT >= 0).sum()
    with autocast(run.device, run.config.trainer.precision):
        sums, bound_L = run.step.forward(batch, inv_n)
    run.model.zero_grad()
    (3 * sums.objective).backward()
    flat = [sums.objective.detach(), sums.ce, *sums.terms, sums.z_raw, sums.log_z, sums.log_z_max, *sums.measured]
    return [*flat, *bound_L], [p.grad for p in run.model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_sums_and_gradients_of_the_whole(
    case: str, tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run("model.init.std=0.1", *CASES[case])
    batch = run.objective.batch(torch.from_numpy(run.sampler.batch(0, 5)), 0)
    plain = outcome(run, batch)
    seen: list[int] = []
    output = run.model.output
    monkeypatch.setattr(run.model, "output", lambda x, bound: seen.append(len(x)) or output(x, bound))
    monkeypatch.setattr(chunked_loss, "LOGITS", 100)
    monkeypatch.setattr(chunked_loss, "ROWS", 32)
    chunked = outcome(run, batch)
    assert seen == [2, 2, 1]
    exact = 1e-3 if "bf16" in case else 2e-6  # bf16: a product of fewer rows may round otherwise
    tolerance = 1e-2 if "bf16" in case else 2e-6
    for ours, whole in zip(chunked[0], plain[0], strict=True):
        torch.testing.assert_close(ours, whole, rtol=exact, atol=1e-6)
    for ours, whole in zip(chunked[1], plain[1], strict=True):
        assert (ours - whole).norm() <= tolerance * whole.norm()


def test_where_it_was_not_measured_the_plain_path_stays(tiny_run: Any) -> None:
    assert "chunked" in tiny_run().step.forward.__qualname__
    for words in (("model.implementation=reference",), ("trainer.precision=fp16",)):
        assert "chunked" not in tiny_run(*words).step.forward.__qualname__


def test_validation_takes_no_more_samples_at_once_than_a_chunk(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("model.pad_vocab_to=320")
    whole = validate(run.model, run.objective, run.eval_windows, 4, run.eval_bytes)
    assert run.step.at_once(4) == 4
    monkeypatch.setattr(chunked_loss, "LOGITS", 4 * 16 * 320 - 1)  # rows that pad the vocabulary count
    monkeypatch.setattr(chunked_loss, "ROWS", 32)
    assert run.step.at_once(4) == 2
    assert run.step.at_once(3) == 3
    assert tiny_run("model.implementation=reference").step.at_once(4) == 4
    fewer = validate(run.model, run.objective, run.eval_windows, run.step.at_once(4), run.eval_bytes)
    assert fewer == pytest.approx(whole, rel=1e-6)
