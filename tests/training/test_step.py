"""One optimizer step: accumulation, the gradient norm, clipping, precision, and what a bad step leaves behind."""

import copy
import math

import pytest
import torch
from torch import Tensor

from stability_lab.model.init import fingerprints
from stability_lab.model.transformer import GPT
from stability_lab.objective.objective import Batch
from stability_lab.training.loop import Run
from stability_lab.training.optimizers import decay_groups
from stability_lab.training.step import LossScale, forward_loss


def batch_of(run: Run, step: int = 1, size: int = 4) -> Batch:
    first = (step - 1) * size
    return run.objective.batch(torch.from_numpy(run.sampler.batch(first, size)), first)


def state_of(run: Run) -> list[Tensor]:
    """Copies of weights, moments and step counts."""
    update = run.step.update
    return [value.detach().clone() for value in (*update.parameters, *update.state().values())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("stabilizer", ["none", "zloss", "qknorm", "rmsnorm"])
def test_accumulation_does_not_change_the_step(tiny_run, train_steps, stabilizer):
    runs, rows = [], []
    for size, accum in ((8, 1), (4, 2), (2, 4)):
        split = (f"trainer.micro_batch_size={size}", f"trainer.grad_accum_steps={accum}")
        run = tiny_run(f"+stabilizer={stabilizer}", *split, "optimizer.eps=1e-6")
        rows.append(train_steps(run, 3))
        runs.append(run)
    for run, other in zip(runs[1:], rows[1:], strict=True):
        for whole, split in zip(rows[0], other, strict=True):
            # Largest |q| times largest |k| of a micro-batch: the smaller it is, the tighter.
            assert split.pop("attn/logit_bound") <= whole["attn/logit_bound"] * (1 + 1e-4)
            assert split == pytest.approx({key: whole[key] for key in split}, rel=1e-4)
        for (name, a), b in zip(runs[0].model.named_parameters(), run.model.parameters(), strict=True):
            # Adam divides by the gradient's size: an entry near 0 may turn its sign within rounding.
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_the_same_run_twice_is_bit_equal(tiny_run, train_steps):
    results = []
    for _ in range(2):
        run = tiny_run("model.dropout=0.1", "trainer.grad_accum_steps=2")
        results.append((train_steps(run, 5), state_of(run)))
        torch.randn(7)  # what happens to torch's generator between two runs does not matter
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])


def test_loss_is_the_mean_over_the_tokens_of_the_step(tiny_run, train_steps):
    run = tiny_run("trainer.grad_accum_steps=2")
    batch = batch_of(run, size=8)
    with torch.no_grad():
        logits = run.model(batch.inputs_MT).logits_BTV.double()
    log_z = torch.logsumexp(logits, -1)
    expected = (log_z - logits.gather(-1, batch.targets_MT[..., None]).squeeze(-1)).mean().item()
    (row,) = train_steps(run, 1)
    assert row["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert row["train/log_z_mean"] == pytest.approx(log_z.mean().item(), rel=1e-6)
    assert row["train/log_z_max"] == pytest.approx(log_z.abs().max().item(), rel=1e-6)
    assert row["train/z_raw"] == pytest.approx(log_z.square().mean().item(), rel=1e-6)


def gradients_of(run: Run, batch: Batch) -> GPT:
    """A copy of the model with the gradients of this batch."""
    model = copy.deepcopy(run.model)
    inverse = torch.tensor(1 / batch.targets_MT.numel())
    forward_loss(model, run.objective, [])(batch, inverse)[0].objective.backward()
    return model


@pytest.mark.parametrize("clip", ["null", "1e9", "0.05"])
def test_norm_is_measured_before_clipping(tiny_run, clip):
    run = tiny_run(f"trainer.grad_clip={clip}")
    batch = batch_of(run)
    model = gradients_of(run, batch)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))
    row = dict(zip(run.step.columns, run.step(batch, 1e-3).tolist(), strict=True))
    assert row["optim/grad_norm"] == pytest.approx(exact, rel=1e-6)
    assert exact > 0.05
    expected = 0.05 / (exact + 1e-6) if clip == "0.05" else 1.0
    assert row["optim/clip_coef"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("clip", [0.05, None])
def test_equals_torch_clipping_and_unfused_adamw(tiny_run, clip):
    run = tiny_run(f"trainer.grad_clip={'null' if clip is None else clip}", "optimizer.eps=1e-3")
    model = copy.deepcopy(run.model)
    names = {name for name, _ in model.named_parameters() if name.endswith("weight") and "norm" not in name}
    decay = [p for name, p in model.named_parameters() if name in names - {"embed.weight"}]
    rest = [p for name, p in model.named_parameters() if name not in names - {"embed.weight"}]
    theirs = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-3,
        foreach=False,
        fused=False,
    )
    for step in (1, 2, 3):
        batch, lr = batch_of(run, step), 1e-2 / step
        theirs.zero_grad()
        inverse = torch.tensor(1 / batch.targets_MT.numel())
        forward_loss(model, run.objective, [])(batch, inverse)[0].objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
        row = dict(zip(run.step.columns, run.step(batch, lr).tolist(), strict=True))
        assert row["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for (name, a), b in zip(run.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_bad_gradient_changes_nothing_from_then_on(tiny_run, train_steps, poison):
    run = tiny_run()
    (good,) = train_steps(run, 1)
    before = state_of(run)
    assert len(before) == 4 * len(run.step.update.parameters)
    parameter = run.model.blocks[0].attn.wk.weight  # type: ignore[union-attr]
    hook = parameter.register_hook(lambda gradient: gradient * poison)
    row = dict(zip(run.step.columns, run.step(batch_of(run, 2), 1e-2).tolist(), strict=True))
    hook.remove()
    assert good["bad"] == 0
    assert row["bad"] == 1
    assert math.isfinite(row["train/loss"])
    assert not math.isfinite(row["optim/grad_norm"])
    assert row["optim/skipped"] == 0
    assert equal(state_of(run), before)
    later = dict(zip(run.step.columns, run.step(batch_of(run, 3), 1e-2).tolist(), strict=True))
    assert later["bad"] == 0  # the step itself was sound, and still nothing moves
    assert equal(state_of(run), before)
    assert run.step.stopped


def test_bad_loss_stops_the_first_step_as_well(tiny_run):
    run = tiny_run()
    with torch.no_grad():
        run.model.head.weight[5] = math.inf
    weights = [p.detach().clone() for p in run.step.update.parameters]
    row = dict(zip(run.step.columns, run.step(batch_of(run), 1e-2).tolist(), strict=True))
    assert row["bad"] == 1
    assert not math.isfinite(row["train/loss"])
    assert equal([p.detach() for p in run.step.update.parameters], weights)
    assert all(value.eq(0).all() for value in run.step.update.state().values())


def test_bf16_stays_close_to_fp32(tiny_run, train_steps):
    exact, low = (train_steps(tiny_run(f"trainer.precision={precision}"), 5) for precision in ("fp32", "bf16"))
    for a, b in zip(exact, low, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=0.01)
        assert b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=0.05)
        assert b["optim/loss_scale"] == 1
    assert exact != low


def test_fp64_is_of_weights_loss_and_optimizer_and_begins_with_the_same_weights(tiny_run, train_steps):
    exact, run = tiny_run(), tiny_run("trainer.precision=fp64", "+stabilizer=zloss")
    assert fingerprints(run.model) == fingerprints(exact.model)
    (row,) = train_steps(run, 1)
    batch = batch_of(exact)
    row32 = dict(zip(exact.step.columns, exact.step(batch, 1e-2).tolist(), strict=True))
    assert row["train/loss"] == pytest.approx(row32["train/loss"], rel=1e-6)
    tensors = {name: value.dtype for name, value in run.step.state().items() if name.startswith("optimizer/exp")}
    assert {p.dtype for p in run.model.parameters()} | set(tensors.values()) == {torch.float64}


@pytest.mark.oracle
def test_fp64_steps_are_those_of_torch_in_double(tiny_run):
    """Clipped, with an N that is no power of two: only the clip factor is of 24 bits."""
    run = tiny_run(
        "trainer.precision=fp64", "trainer.micro_batch_size=3", "trainer.grad_clip=0.05", "optimizer.eps=1e-3"
    )
    model, batch = copy.deepcopy(run.model), batch_of(run, 3)
    groups = decay_groups(model, run.config.optimizer["weight_decay"], False)
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, foreach=False)
    for _ in range(3):
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(
            model(batch.inputs_MT).logits_BTV.flatten(0, 1), batch.targets_MT.flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        theirs.step()
        run.step(batch, 1e-2)
    for ours, other in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-8)
        assert (ours - ours.float()).abs().max() > 0


def test_fp16_norm_is_unscaled_and_weights_stay_fp32(tiny_run, train_steps):
    exact = train_steps(tiny_run(), 3)
    run = tiny_run("trainer.precision=fp16")
    low = train_steps(run, 3)
    for a, b in zip(exact, low, strict=True):
        assert b["optim/loss_scale"] == 65536
        assert b["optim/skipped"] == 0
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=0.01)
        assert b["optim/grad_norm"] == pytest.approx(a["optim/grad_norm"], rel=0.01)
        assert b["optim/clip_coef"] == pytest.approx(a["optim/clip_coef"], rel=0.01)
    assert {p.dtype for p in run.step.update.parameters} == {torch.float32}


def test_fp16_overflow_is_skipped_and_no_divergence(tiny_run, train_steps):
    run = tiny_run("trainer.precision=fp16")
    train_steps(run, 1)
    before = state_of(run)
    run.step.scale.value.fill_(2.0**40)
    row = dict(zip(run.step.columns, run.step(batch_of(run, 2), 1e-2).tolist(), strict=True))
    assert row["optim/skipped"] == 1
    assert row["bad"] == 0
    assert row["optim/loss_scale"] == 2.0**40
    assert math.isfinite(row["train/loss"])
    assert equal(state_of(run), before)
    assert not run.step.stopped
    assert run.step.scale.value == 2.0**39
    run.step.scale.value.fill_(1024.0)
    row = dict(zip(run.step.columns, run.step(batch_of(run, 2), 1e-2).tolist(), strict=True))
    assert (row["optim/skipped"], row["bad"]) == (0, 0)
    assert not equal(state_of(run), before)


def test_fp16_overflow_at_scale_one_is_a_divergence(tiny_run):
    run = tiny_run("trainer.precision=fp16")
    run.step.scale.value.fill_(1.0)
    run.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
    row = dict(zip(run.step.columns, run.step(batch_of(run), 1e-2).tolist(), strict=True))
    assert (row["optim/skipped"], row["bad"]) == (0, 1)


def test_loss_scale_doubles_after_2000_good_steps():
    scale, good, overflow = LossScale(torch.device("cpu"), True), torch.tensor(0.0), torch.tensor(1.0)
    for _ in range(1999):
        scale.update(good)
    assert scale.value == 65536
    scale.update(good)
    assert scale.value == 131072
    scale.update(overflow)
    assert scale.value == 65536
    off = LossScale(torch.device("cpu"), False)
    off.update(overflow)
    assert off.value == 1
