"""One optimizer step on the device: fused AdamW, bad steps, overflow, no wait for the device, compilation."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from stability_lab.judge.events import find_events
from stability_lab.objective.objective import Batch
from stability_lab.training.loop import Loop, Run
from stability_lab.training.optimizers import AdamW
from stability_lab.training.update import Update

pytestmark = pytest.mark.gpu


def batch_of(run: Run, step: int) -> Batch:
    size = run.config.trainer.micro_batch_size * run.config.trainer.grad_accum_steps
    first = (step - 1) * size
    return run.objective.batch(torch.from_numpy(run.sampler.batch(first, size)).to(run.device), first)


def state_of(update: Update) -> list[Tensor]:
    """Copies of weights, moments and step counts."""
    return [value.detach().clone() for value in (*update.parameters, *update.state().values())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def with_gradients(device: torch.device, *, size: float) -> nn.Module:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 70_000), nn.LayerNorm(5)).to(device)
    generator = torch.Generator(device).manual_seed(1)
    for p in model.parameters():
        p.grad = size * torch.randn(p.shape, generator=generator, device=device)
    return model


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_called_off_keeps_every_bit(device, poison):
    model = with_gradients(device, size=1.0)
    update = AdamW().build(model)
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    update.step(1e-2, one, zero)
    before = state_of(update)
    for p in model.parameters():
        assert p.grad is not None
        p.grad[0] = poison
    update.step(1e-2, one, one)
    assert len(before) == 4 * len(list(model.parameters()))
    assert equal(state_of(update), before)


def test_the_first_step_called_off_leaves_fresh_moments(device):
    model = with_gradients(device, size=math.nan)
    update = AdamW().build(model)
    weights = state_of(update)  # it has no moments yet
    update.step(1e-2, torch.ones((), device=device), torch.ones((), device=device))
    n = len(weights)
    assert len(state_of(update)) == 4 * n
    assert equal(state_of(update)[:n], weights)
    assert not any(value.any() for value in state_of(update)[n:])


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_divisor_equals_clipping_before_plain_adamw(device, clip):
    config = AdamW(eps=1e-4)
    ours = with_gradients(device, size=3.0)
    theirs = copy.deepcopy(ours)
    update = config.build(ours)
    plain = torch.optim.AdamW(
        [
            {"params": [theirs[1].weight], "weight_decay": config.weight_decay},  # type: ignore[union-attr]
            {"params": [p for p in theirs.parameters() if p is not theirs[1].weight], "weight_decay": 0.0},  # type: ignore
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=False,
        fused=False,
    )
    scale = 1024.0
    for _ in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.grad is not None
            b.grad = a.grad.clone()
            a.grad *= scale
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        plain.step()
        coef = (clip / (norm + 1e-6)).clamp_max(1.0)
        update.step(config.lr, scale / coef, torch.zeros((), device=device))
        for p in ours.parameters():
            assert p.grad is not None
            # Gradients of another direction next time. What a step leaves in .grad is torch's affair.
            p.grad = torch.roll(torch.nan_to_num(p.detach()), 1, 0) * 2
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bad_gradient_changes_nothing_from_then_on(gpu_run, take_steps, precision):
    run = gpu_run(f"trainer.precision={precision}")
    take_steps(run, 1)
    before = state_of(run.step.update)
    with torch.no_grad():
        kept = run.model.final_norm.weight.clone()  # type: ignore[operator]
        run.model.final_norm.weight.fill_(math.nan)  # type: ignore[operator]
    row = dict(zip(run.step.columns, run.step(batch_of(run, 2), 1e-2).tolist(), strict=True))
    with torch.no_grad():
        run.model.final_norm.weight.copy_(kept)  # type: ignore[operator]
    assert (row["bad"], row["optim/skipped"]) == (1, 0)
    assert equal(state_of(run.step.update), before)
    later = dict(zip(run.step.columns, run.step(batch_of(run, 3), 1e-2).tolist(), strict=True))
    assert later["bad"] == 0
    assert equal(state_of(run.step.update), before)


def test_fp16_overflow_is_skipped_and_counted(gpu_run, sink):
    run = gpu_run("trainer.precision=fp16", "trainer.max_steps=6")
    run.step.scale.value.fill_(2.0**40)
    weights = [p.detach().clone() for p in run.step.update.parameters]
    loop = Loop(run, sink)
    loop.train()
    _, summary = loop.judge()
    assert loop.stopped_by is None
    assert summary["skipped_steps"] == 6
    assert [(event.kind, event.length) for event in find_events(loop.watch.log())] == [("skipped_step", 6)]
    assert {event["event"] for event in sink.events} == {"skipped_step"}
    assert run.step.scale.value.item() == 2.0**34
    assert equal([p.detach() for p in run.step.update.parameters], weights)


WAITLESS = [
    ("+stabilizer=none", "trainer.precision=fp32"),
    ("+stabilizer=[qknorm,zloss,rmsnorm]", "trainer.precision=bf16", "trainer.grad_accum_steps=2"),
    ("+stabilizer=[softcap,final_softcap]", "trainer.precision=bf16"),
    ("+stabilizer=zloss", "trainer.precision=fp16", "model.bias=true"),
]


@pytest.mark.parametrize("overrides", WAITLESS, ids=lambda words: words[0].partition("=")[2])
def test_a_step_never_waits_for_the_device(cuda, gpu_run, overrides):
    run = gpu_run(*overrides)
    tokens = [batch_of(run, step) for step in range(1, 6)]
    for batch in tokens[:2]:
        run.step(batch, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = [run.step(batch, 1e-3) for batch in tokens[2:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row[run.step.columns.index("bad")].item() == 0 for row in rows)


@pytest.mark.parametrize("stabilizer", ["[qknorm,zloss]", "softcap"])
@pytest.mark.parametrize("compile", ["block", "full"])
def test_compiled_steps_equal_eager_ones(cuda, gpu_run, take_steps, compile, stabilizer):
    eager = take_steps(gpu_run(f"+stabilizer={stabilizer}"), 3)
    torch.compiler.reset()
    counters.clear()
    compiled = take_steps(gpu_run(f"+stabilizer={stabilizer}", f"trainer.compile={compile}"), 3)
    assert counters["stats"]["unique_graphs"] > 0, f"trainer.compile={compile} compiled nothing"
    for a, b in zip(compiled, eager, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-3)
