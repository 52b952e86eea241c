"""A loop that goes on from a checkpoint ends bit for bit where one without a stop ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stability_lab.judge import watch
from stability_lab.judge.series import Row
from stability_lab.training import loop as loop_module
from stability_lab.training.checkpoint import Checkpoints, find_newest

STEPS = ("trainer.max_steps=13", "trainer.log_every=4", "trainer.eval_every=5", "diagnostics.probe_every=3")
CASES = {
    "plain": (),
    "dropout, accumulation, wsd": (
        "model.dropout=0.2",
        "trainer.grad_accum_steps=2",
        "trainer.micro_batch_size=2",
        "schedule=wsd",
        "schedule.decay_fraction=0.5",
    ),
    "fp16 with overflows": ("trainer.precision=fp16", "model.dropout=0.1"),
    "fp64, stabilizers": ("trainer.precision=fp64", "+stabilizer=[qknorm,zloss,rmsnorm]"),
    "bf16, stabilizers, tied": ("trainer.precision=bf16", "+stabilizer=[qknorm,zloss]", "model.tied_head=true"),
    "bad steps": ("stability.on_nonfinite=skip", "debug.inject=[nan_grad@2,nan_loss@9]"),
    "decay on its own, an epoch's end": (
        "optimizer.weight_decay_mode=independent",
        "data.val_every=2",
        "model.dropout=0.1",
    ),
}


def rows_of(trained) -> list[Row]:
    """All that was measured; what the clock says is left out."""
    return [{k: repr(v) for k, v in row.items() if not k.startswith("perf/")} for row in trained.sink.seen]


def prepared(prepare, case: str, folder: Path, every: int | None = None) -> Any:
    result = prepare(*STEPS, *CASES[case])
    result.loop.checkpoints = Checkpoints(folder, every, 9)
    if "fp16" in case:  # so large that the first steps overflow, as happens on a GPU
        result.run.step.scale.value.fill_(2.0**40)
    return result


def everything(trained) -> dict[str, torch.Tensor]:
    state = trained.loop.state()
    return {**state.model, **{k: v for k, v in state.training.items() if k != "random/cpu"}}


def assert_same(ours, other) -> None:
    a, b = everything(ours), everything(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].nan_to_num(nan=7.0), b[name].nan_to_num(nan=7.0)), name
    plain = [{k: v for k, v in x.loop.state().plain.items() if k != "tokens_per_s"} for x in (ours, other)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stop", [4, 7])
def test_it_goes_on_bit_for_bit(prepare, tmp_path, case, stop):
    """Step 4 is a flush of its own; at 7 only the interruption flushes."""
    whole = prepared(prepare, case, tmp_path / "whole")
    whole.loop.train()
    first = prepared(prepare, case, tmp_path / "parts")
    first.loop.interrupted = lambda: first.loop._pending[-1]["step"] == stop
    first.loop.train()
    assert first.loop.stopped_by == "interruption"
    assert len(first.sink.seen) == first.loop.watch.n == stop
    torch.manual_seed(123)  # another process starts with other random numbers
    second = prepared(prepare, case, tmp_path / "parts")
    newest = find_newest(tmp_path / "parts")
    assert newest.state is not None
    second.loop.load_state(newest.state)
    second.loop.train()
    assert second.loop.stopped_by is None
    assert rows_of(first) + rows_of(second) == rows_of(whole)
    assert repr(first.sink.events + second.sink.events) == repr(whole.sink.events)
    assert_same(second, whole)
    if "fp16" in case:
        assert sum(row["optim/skipped"] for row in whole.sink.seen) > 3
        assert whole.run.step.scale.value < 2.0**40


def test_checkpoints_in_between_change_nothing(prepare, tmp_path):
    never = prepared(prepare, "dropout, accumulation, wsd", tmp_path / "never")
    never.loop.train()
    often = prepared(prepare, "dropout, accumulation, wsd", tmp_path / "often", every=1)
    often.loop.train()
    assert rows_of(often) == rows_of(never)
    assert [("perf/tokens_per_s" in row) for row in often.sink.seen] == [
        ("perf/tokens_per_s" in row) for row in never.sink.seen
    ]
    assert_same(often, never)
    assert len(list((tmp_path / "often").glob("step-*"))) == 8
    assert [path.name for path in (tmp_path / "never").glob("step-*")] == []


@pytest.mark.parametrize("stop", [5, 6])
def test_a_divergence_stops_a_run_at_the_same_step_whether_it_was_resumed_or_not(prepare, tmp_path, monkeypatch, stop):
    """The judge is asked every few steps; the rule here says yes from step 6 on."""
    monkeypatch.setattr(watch, "diverged_at", lambda log, warmup: 6 if len(log) >= 6 else None)

    def make():
        result = prepare("trainer.max_steps=30", "trainer.log_every=2", "trainer.eval_every=3")
        result.loop.checkpoints = Checkpoints(tmp_path, None, 2)
        return result

    whole = make()
    whole.loop.train()
    assert whole.loop.stopped_by == "divergence"
    first = make()
    first.loop.interrupted = lambda: first.loop._pending[-1]["step"] == stop
    if stop < whole.loop.watch.n:
        first.loop.train()
        second = make()
        newest = find_newest(tmp_path)
        assert newest.state is not None
        second.loop.load_state(newest.state)
        second.loop.train()
        assert second.loop.stopped_by == "divergence"
        assert rows_of(first) + rows_of(second) == rows_of(whole)


@pytest.mark.parametrize("every", [None, 1])
def test_a_run_that_a_bad_step_ends_leaves_the_weights_before_it(prepare, tmp_path, every):
    result = prepare("trainer.max_steps=6", "trainer.log_every=3", "debug.inject=nan_grad@5")
    result.loop.checkpoints = Checkpoints(tmp_path, every, 2)
    result.loop.train()
    assert result.loop.stopped_by == "nonfinite"
    newest = find_newest(tmp_path)
    assert (newest.state is None) == (every is None)
    if newest.state is not None:
        assert newest.state.plain["step"] == 4
        assert all(torch.equal(a, newest.state.model[name]) for name, a in result.run.model.state_dict().items())
    assert (tmp_path / "last" / "model.safetensors").is_file()


def test_the_best_weights_are_those_of_the_lowest_validation_loss(prepare, tmp_path, monkeypatch):
    losses = iter([9.0, 5.0, 3.0, 4.0, math.nan])
    monkeypatch.setattr(
        loop_module,
        "validate",
        lambda *_: {"val/loss": (loss := next(losses)), "val/ppl": loop_module.perplexity(loss)},
    )
    result = prepare("trainer.max_steps=4", "trainer.eval_every=1", "trainer.log_every=1")
    result.loop.checkpoints = Checkpoints(tmp_path, 1, 9)
    result.loop.train()
    best = (tmp_path / "best" / "model.safetensors").read_bytes()
    assert best == (tmp_path / "step-000002" / "model.safetensors").read_bytes()
    assert best != (tmp_path / "last" / "model.safetensors").read_bytes()
    assert result.loop.watch.best["step"] == 2


def test_weights_that_are_not_finite_are_not_saved_and_the_run_says_so(prepare, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(loop_module._log, "warning", lambda text, *values: said.append(text % values))
    result = prepare("optimizer.lr=1e38", "schedule.warmup_steps=0", "trainer.max_steps=3")
    result.loop.checkpoints = Checkpoints(tmp_path, 1, 2)
    result.loop.train()
    assert result.loop.stopped_by == "nonfinite"
    assert not list(tmp_path.glob("*/model.safetensors"))
    assert said[0] == "no checkpoint at step 1: a weight is not finite, so the one before it stays"


class Stream:
    """A source of batches that the step alone does not find again."""

    def __init__(self, sampler):
        self.sampler, self.position = sampler, 0

    def batch(self, _: int, n: int):
        self.position += n
        return self.sampler.batch(self.position * 3, n)

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_source_with_a_state_of_its_own_goes_on_too(prepare, tmp_path):
    def make():
        result = prepared(prepare, "plain", tmp_path)
        result.loop.run = result.run._replace(sampler=Stream(result.run.sampler))
        return result

    whole, first, second = make(), make(), make()
    whole.loop.train()
    first.loop.interrupted = lambda: first.loop._pending[-1]["step"] == 6
    first.loop.train()
    newest = find_newest(tmp_path)
    assert newest.state is not None
    second.loop.load_state(newest.state)
    second.loop.train()
    assert rows_of(first) + rows_of(second) == rows_of(whole)


def test_a_state_of_another_run_is_refused(prepare, tmp_path):
    result = prepared(prepare, "plain", tmp_path)
    result.loop.train()
    good = result.loop.state()
    training = dict(good.training)
    data, random, rows = "the place in the data", "the state of torch's random numbers", "the measurements so far"
    form = "not of the form that this version writes"
    for broken, why in (
        (good._replace(model={**good.model, "more": torch.zeros(1)}), "more of shape 1 has no place in the model"),
        (
            good._replace(training={k: v for k, v in training.items() if k != "random/cpu"}),
            f"{random}: random/cpu is mis",
        ),
        (good._replace(training={k: v for k, v in training.items() if k != "series/tokens"}), rows),
        (good._replace(training={k: v for k, v in training.items() if k != "scale/value"}), "scale/value is missing"),
        (good._replace(training={k: v for k, v in training.items() if "exp_avg_sq" not in k}), "the optimizer's state"),
        (good._replace(training=training | {"optimizer/exp_avg/nobody": torch.zeros(1)}), "optimizer/exp_avg/nobody"),
        (good._replace(training=training | {"random/cpu": torch.zeros(3, dtype=torch.uint8)}), f"{random}: {form}"),
        (good._replace(plain=good.plain | {"step": 5}), r"it holds \d+ rows for 5 steps"),
        (good._replace(plain=good.plain | {"watch": []}), f"{rows}: {form}"),
        (good._replace(plain=good.plain | {"watch": good.plain["watch"] | {"looked_at": "many"}}), f"{rows}: {form}"),
        (good._replace(plain=good.plain | {"sampler": {"position": 9}}), f"{data}: {form}"),
    ):
        with pytest.raises(ValueError, match=f"^{why}"):
            prepared(prepare, "plain", tmp_path).loop.load_state(broken)
    other = prepared(prepare, "plain", tmp_path)
    other.loop.load_state(good)
    assert_same(other, result)
