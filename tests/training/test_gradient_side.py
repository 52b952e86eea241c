"""The gradient side: a declared order, a state that survives, and nothing at all where a step is called off."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stability_lab.build import build_step
from stability_lab.seams import AfterStep, Gradients, GradientStep, Seams, Site
from stability_lab.training.gradient_side import GRAD_CLIP, ClipByNorm, GradientSide
from stability_lab.training.loop import Run

SITE = Site(0, 1, "embed", 8, n_heads=1, n_kv_heads=1, head_dim=8)


class Halve(GradientStep):
    """Halves every gradient in place and counts the steps that were taken."""

    count: Tensor

    def __init__(self, order: int = 0):
        super().__init__()
        self.order = order
        self.register_buffer("count", torch.zeros(()))

    def forward(self, gradients: Gradients) -> Gradients:
        for gradient in gradients.grads:
            gradient.mul_(0.5)
        self.count += ~gradients.call_off
        return gradients._replace(norm=gradients.norm * 0.5)


class Skip(GradientStep):
    """Calls every second step off."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, gradients: Gradients) -> Gradients:
        self.seen += 1
        return gradients._replace(call_off=gradients.call_off | (self.seen % 2 == 0))


class Shrink(nn.Module):
    """Shrinks the embedding after each step that was taken."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, after: AfterStep) -> None:
        self.steps += ~after.call_off
        weight = after.model.get_parameter("embed.weight")
        weight.copy_(torch.where(after.call_off, weight, 0.5 * weight))


@pytest.fixture
def run_with(tiny_run):
    """`run_with(seam, make, *overrides)`: a tiny run with a claim of "test" on `grad` or `post_step`."""

    def build(seam: str, make: Callable[[Site], nn.Module], *overrides: str) -> Run:
        run = tiny_run(*overrides)
        run.model.seams = run.model.seams.claim("test", **{seam: make})
        return run._replace(step=build_step(run.config, run.model, run.objective))

    return build


def step(run: Run, number: int, poison: str | None = None) -> dict[str, float]:
    batch = run.objective.batch(torch.from_numpy(run.sampler.batch((number - 1) * 4, 4)), 0)
    return dict(zip(run.step.columns, run.step(batch, 1e-2, poison).tolist(), strict=True))


def test_order_is_declared_and_not_that_of_claims():
    late, early = (lambda site: Halve(5)), (lambda site: Halve(-1))
    for names in (("zz", "aa"), ("aa", "zz")):
        seams = Seams()
        for name in names:
            seams = seams.claim(name, grad=late if name == "aa" else early)
        assert list(GradientSide(seams, SITE, 1.0).grad) == ["zz", "aa", GRAD_CLIP]
    assert list(GradientSide(Seams(), SITE, None).grad) == []


def test_clipping_sees_what_the_others_left():
    side = GradientSide(Seams().claim("halve", grad=lambda site: Halve()), SITE, 1.0)
    gradient = torch.tensor([3.0, 4.0])
    false = torch.zeros((), dtype=torch.bool)
    done = side.before(Gradients([gradient], torch.ones(()), torch.tensor(5.0), torch.ones(()), false))
    assert gradient.tolist() == [1.5, 2.0]
    assert done.norm == 2.5
    assert done.coef.item() == pytest.approx(0.4)
    again = ClipByNorm(0.5)(done)  # another clipping on top goes on from there
    assert (again.norm * again.coef).item() == pytest.approx(0.5)


def test_a_claim_on_grad_acts_on_the_update_and_its_state_is_in_the_checkpoint(run_with, tiny_run):
    words = ("optimizer=sgd", "optimizer.momentum=0", "trainer.grad_clip=null")
    run, plain = run_with("grad", lambda site: Halve(), *words), tiny_run(*words)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    row, theirs = step(run, 1), step(plain, 1)
    assert row["optim/grad_norm"] == theirs["optim/grad_norm"]  # as the backward pass gave it
    for (name, a), b in zip(run.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a - before[name], (b - before[name]) / 2, rtol=1e-3, atol=1e-7)
    state = run.step.state()
    assert state["side/grad.test.count"] == 1
    other = run_with("grad", lambda site: Halve(), *words)
    other.step.load_state(state)
    assert other.step.state()["side/grad.test.count"] == 1
    with pytest.raises(ValueError, match=r"the gradient side: (?s:.*)count"):
        plain.step.load_state(state)


def test_a_bad_step_is_told_and_changes_no_state(run_with):
    run = run_with("grad", lambda site: Halve(), "stability.on_nonfinite=skip")
    step(run, 1)
    assert step(run, 2, "nan_grad")["bad"] == 1
    assert run.step.state()["side/grad.test.count"] == 1


def test_what_the_gradient_side_calls_off_is_skipped_and_changes_nothing(run_with):
    run = run_with("grad", lambda site: Skip())
    assert step(run, 1)["optim/skipped"] == 0
    before = [p.detach().clone() for p in run.model.parameters()]
    row = step(run, 2)
    assert (row["optim/skipped"], row["bad"]) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert step(run, 3)["optim/skipped"] == 0


def test_post_step_changes_weights_unless_the_step_was_called_off(run_with, tiny_run):
    words = ("stability.on_nonfinite=skip",)
    run, plain = run_with("post_step", lambda site: Shrink(), *words), tiny_run(*words)
    step(run, 1)
    step(plain, 1)
    torch.testing.assert_close(run.model.embed.weight, 0.5 * plain.model.embed.weight)
    before = run.model.embed.weight.detach().clone()
    step(run, 2, "nan_loss")
    assert torch.equal(run.model.embed.weight, before)
    assert run.step.state()["side/post_step.test.steps"] == 1
