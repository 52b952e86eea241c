"""Any torch optimizer behind `Update`: clipping, a step that is called off, and resuming hold for all of them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stability_lab.config import ConfigError
from stability_lab.training.loop import Run
from stability_lab.training.update import FusedUpdate, SnapshotUpdate, TorchUpdate

LR = 1e-2


def adafactor(model: nn.Module) -> TorchUpdate:
    return SnapshotUpdate([torch.optim.Adafactor(model.parameters(), lr=LR)], model, LR)


def sgd(model: nn.Module) -> TorchUpdate:
    return SnapshotUpdate([torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)], model, LR)


def plain_sgd(model: nn.Module) -> TorchUpdate:
    """It keeps no state."""
    return SnapshotUpdate([torch.optim.SGD(model.parameters(), lr=LR)], model, LR)


def muon(model: nn.Module) -> TorchUpdate:
    """Muon for the matrices inside the blocks at ten times the rate, AdamW for all else."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    held = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in held]
    return SnapshotUpdate([torch.optim.Muon(matrices, lr=10 * LR), torch.optim.AdamW(rest, lr=LR)], model, LR)


def adamw(model: nn.Module) -> TorchUpdate:
    return FusedUpdate([torch.optim.AdamW(model.parameters(), lr=LR, fused=True)], model, LR)


MAKE = {make.__name__: make for make in (sgd, plain_sgd, adafactor, muon, adamw)}


@pytest.fixture(params=MAKE.values(), ids=list(MAKE))
def make(request) -> Callable[[nn.Module], TorchUpdate]:
    return request.param


@pytest.fixture
def run_with(tiny_run):
    """`run_with(make, *overrides)`: a tiny run that `make` updates."""

    def build(make: Callable[[nn.Module], TorchUpdate], *overrides: str) -> Run:
        run = tiny_run(f"optimizer.lr={LR}", "trainer.max_steps=30", *overrides)
        run.step.update = make(run.model)
        return run

    return build


def bits(run: Run) -> dict[str, Tensor]:
    held = {**dict(run.model.named_parameters()), **run.step.state()}
    return {name: value.detach().clone() for name, value in held.items() if not name.startswith(("stopped", "scale"))}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step(run: Run, number: int, poison: str | None = None) -> dict[str, float]:
    windows = torch.from_numpy(run.sampler.batch((number - 1) * 4, 4))
    row = run.step(run.objective.batch(windows, (number - 1) * 4), run.schedule.lr(number), poison)
    return dict(zip(run.step.columns, row.tolist(), strict=True))


@pytest.mark.parametrize("poison", ["nan_grad", "inf_loss"])
def test_a_bad_step_keeps_every_bit_and_the_next_goes_on(make, poison, run_with):
    run = run_with(make, "stability.on_nonfinite=skip")
    losses = [step(run, number)["train/loss"] for number in range(1, 20)]
    assert losses[-1] < losses[0]
    before = bits(run)
    row = step(run, 20, poison)
    assert row["bad"] == 1
    assert same(bits(run), before)
    assert step(run, 21)["bad"] == 0
    after = bits(run)
    assert not any(torch.equal(after[name], before[name]) for name, _ in run.model.named_parameters())
    assert all(value.isfinite().all() for value in after.values())


def test_a_first_step_called_off_leaves_a_fresh_optimizer(make, run_with):
    run, fresh = run_with(make, "stability.on_nonfinite=skip"), run_with(make)
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert step(run, 1, "nan_grad")["bad"] == 1
    assert all(torch.equal(p, weights[name]) for name, p in run.model.named_parameters())
    assert all(not value.any() for value in run.step.update.state().values())
    step(run, 2)
    step(fresh, 2)
    assert same(bits(run), bits(fresh))


def test_clipping_holds(make, run_with):
    """A gradient that is clipped gives what the same gradient gives after it was divided by hand."""
    run, theirs = run_with(make, "trainer.grad_clip=0.1"), run_with(make, "trainer.grad_clip=null")
    row = step(run, 1)
    assert row["optim/clip_coef"] < 0.5
    windows = torch.from_numpy(theirs.sampler.batch(0, 4))
    batch = theirs.objective.batch(windows, 0)
    theirs.step.forward(batch, torch.tensor(1 / batch.targets_MT.numel()))[0].objective.backward()
    nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.1)
    zero = torch.zeros(())
    theirs.step.update.step(theirs.schedule.lr(1), torch.ones(()), zero)
    for (name, a), b in zip(run.model.named_parameters(), theirs.model.parameters(), strict=True):
        # An entry whose gradient is near 0 may turn its sign within rounding where only the sign counts.
        assert (a - b).abs().mean() <= 1e-3 * LR, name


def test_state_comes_back(make, run_with):
    whole, half = run_with(make), run_with(make)
    for number in range(1, 7):
        step(whole, number)
    for number in range(1, 4):
        step(half, number)
    resumed = run_with(make)
    resumed.model.load_state_dict(half.model.state_dict())
    resumed.step.load_state({name: value.clone() for name, value in half.step.state().items()})
    for number in range(4, 7):
        step(resumed, number)
    assert same(bits(resumed), bits(whole))


def test_state_of_another_model_is_refused(tiny_run, run_with):
    run = run_with(sgd)
    step(run, 1)
    state = run.step.state()
    with pytest.raises(ValueError, match="fits no parameter of this model"):
        run.step.load_state({**state, "optimizer/momentum_buffer/blocks.7.attn.wq.weight": torch.zeros(32, 32)})
    with pytest.raises(ValueError, match="fits no parameter of this model"):
        run.step.load_state({**state, "optimizer/momentum_buffer/blocks.0.attn.wq.weight": torch.zeros(32, 31)})
    with pytest.raises(ValueError, match="not the same for all parameters"):
        run.step.load_state({**state, "optimizer/exp_avg/blocks.0.attn.wq.weight": torch.zeros(32, 32)})


def test_groups_keep_their_factor_of_the_rate(run_with):
    run = run_with(muon)
    step(run, 1)
    assert [group["lr"] for group in run.step.update.groups] == pytest.approx(
        [10 * run.schedule.lr(1), run.schedule.lr(1)]
    )


def test_an_optimizer_must_hold_every_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must hold every parameter"):
        SnapshotUpdate([torch.optim.SGD(model[0].parameters(), lr=LR)], model, LR)


def test_an_optimizer_that_counts_in_python_is_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    model = nn.Linear(2, 2)
    update = SnapshotUpdate([Counting(model.parameters(), lr=LR)], model, LR)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match=r"Counting counts in Python numbers .*group 0 steps"):
        update.step(LR, torch.ones(()), torch.zeros(()))


@pytest.mark.slow
def test_the_loop_resumes_and_stops_with_another_optimizer(tiny_config, tmp_path, run_command, tiny_overrides):
    """From the command line: a NaN at step 3 stops a run with SGD, and a killed one goes on bit for bit."""
    words = (*tiny_overrides, "optimizer=sgd", "optimizer.lr=0.1", "trainer.max_steps=6", f"output_dir={tmp_path}")
    assert run_command("train", *words, "run_name=bad", "debug.inject=nan_loss@3").code == 3
    assert run_command("train", *words, "run_name=whole").code == 0
    assert run_command("train", *words, "run_name=half", "debug.inject=raise@4", "trainer.checkpoint_every=3").code == 1
    assert run_command("train", f"resume={tmp_path / 'runs' / 'half'}").code == 0
    rows = [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("whole", "half")]
    losses = [row.partition('"train/loss": ')[2].partition(",")[0] for row in rows]
    assert losses[0] == losses[1] != ""
    assert math.isfinite(float(losses[0]))
