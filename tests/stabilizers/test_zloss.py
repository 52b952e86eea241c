"""z-loss: weight * (log Z)^2 per valid token, in the gradient but never in the reported loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from stability_lab.objective.loss import IGNORE, language_model_loss
from stability_lab.seams import LossRecord
from stability_lab.stabilizers.zloss import SquaredLogZ, ZLoss

ROWS = ((1.0, 2.0, 3.0, 4.0), (0.0, 0.0, 0.0, 0.0), (5.0, -5.0, 0.0, 1.0))
TARGETS = (2, IGNORE, 0)


def rows_with_an_ignored_one() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(ROWS, dtype=torch.float64, requires_grad=True), torch.tensor(TARGETS)


def term(weight: float, dtype: torch.dtype = torch.float64) -> SquaredLogZ:
    return SquaredLogZ(weight).to(dtype)


def inverse(n: int) -> torch.Tensor:
    return torch.tensor(1 / n, dtype=torch.float64)


@pytest.mark.parametrize(("logits", "penalty"), [((10.0, 5.0, 0.0), 0.0100135), ((2.0, 1.0, 0.0), 0.00057966)], ids=str)
def test_published_examples(logits, penalty):
    sums = language_model_loss(torch.tensor([logits]), torch.tensor([0]), torch.tensor(1.0), [SquaredLogZ(1e-4)])
    assert sums.terms[0].item() == pytest.approx(penalty, rel=1e-5)


def test_reference_rows():
    logits, targets = rows_with_an_ignored_one()
    sums = language_model_loss(logits, targets, inverse(2), [term(1e-4)])
    sums.objective.backward()
    assert (sums.ce / 2).item() == pytest.approx(0.7324894390, abs=1e-9)
    assert (sums.log_z / 2).item() == pytest.approx((4.4401896986 + 5.0247891795) / 2, abs=1e-9)
    assert sums.log_z_max.item() == pytest.approx(5.0247891795, abs=1e-9)
    assert sums.objective.item() == pytest.approx(0.7347376286, abs=1e-9)
    # Not 15.6285 (the ignored row counted as well) and not 14.9879 (masked, but divided by three).
    assert (sums.z_raw / 2).item() == pytest.approx(22.4818954286, abs=1e-9)
    assert (sums.terms[0] / 2).item() == pytest.approx(22.4818954286e-4, abs=1e-9)
    assert logits.grad is not None
    assert logits.grad[1].eq(0).all()
    assert logits.grad[[0, 2]].ne(0).all()


def test_uniform_logits_of_the_gpt2_vocabulary():
    sums = language_model_loss(torch.zeros(1, 50257), torch.tensor([7]), torch.tensor(1.0), [SquaredLogZ(1e-4)])
    assert sums.log_z.item() == pytest.approx(10.8249, abs=1e-4)
    assert sums.terms[0].item() == pytest.approx(0.0117179, abs=1e-7)


def test_ignored_logits_change_nothing():
    results = []
    for filling in (0.0, 50.0):
        logits, targets = rows_with_an_ignored_one()
        changed = logits.detach().clone()
        changed[1] = filling
        changed.requires_grad_()
        sums = language_model_loss(changed, targets, inverse(2), [term(0.1)])
        sums.objective.backward()
        results.append([sums.objective, sums.ce, *sums.terms, sums.z_raw, sums.log_z, sums.log_z_max, changed.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_batch_without_a_valid_token_contributes_zero():
    logits = torch.randn(3, 5, requires_grad=True)
    sums = language_model_loss(logits, torch.full((3,), IGNORE), torch.tensor(0.0), [SquaredLogZ(1.0)])
    sums.objective.backward()
    assert all(value.item() == 0 for value in (sums.objective, sums.ce, *sums.terms, sums.z_raw, sums.log_z_max))
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str
)
def test_value_and_gradient_equal_autograd(dtype, rtol):
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (64,))
    targets[::3] = IGNORE
    n, weight = int((targets != IGNORE).sum()), 2**-7  # exact in fp32 too
    logits = (10 * torch.randn(64, 50, dtype=torch.float64)).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    log_z = torch.logsumexp(exact, -1)[targets != IGNORE]
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORE) + weight * log_z.square().mean()
    expected.backward()
    own = torch.promote_types(dtype, torch.float32)
    sums = language_model_loss(logits, targets, torch.tensor(1 / n, dtype=own), [term(weight, own)])
    sums.objective.backward()
    assert sums.objective.dtype == own
    assert sums.objective.item() == pytest.approx(expected.item(), rel=1e-12 if own == torch.float64 else 1e-5)
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rtol, atol=1e-4 * rtol)


@pytest.mark.parametrize("shift", [-9.0, 9.0])
def test_pulls_log_z_towards_zero_from_both_sides(shift):
    logits = (torch.tensor(ROWS) + shift).requires_grad_()
    before = torch.logsumexp(logits, -1)
    SquaredLogZ(0.1)(LossRecord(before, logits, torch.empty(0, 0))).sum().backward()
    assert logits.grad is not None
    after = torch.logsumexp(logits.detach() - logits.grad, -1)
    assert (before.sign() == math.copysign(1, shift)).all()
    assert (after.abs() < before.abs()).all()


def test_weight_zero_trains_bit_identically_to_none(tiny_run, train_steps):
    plain, zero = tiny_run(), tiny_run("+stabilizer=zloss", "stabilizer.zloss.weight=0")
    assert zero.model.seams.owners == {"loss_terms": ("zloss",)}
    rows = train_steps(zero, 5)
    assert [row.pop("train/z_loss") for row in rows] == [0] * 5
    assert train_steps(plain, 5) == rows
    for (name, a), b in zip(plain.model.state_dict().items(), zero.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_reported_loss_never_contains_the_penalty(tiny_run, train_steps):
    plain = train_steps(tiny_run(), 5)
    heavy = train_steps(tiny_run("+stabilizer=zloss", "stabilizer.zloss.weight=1"), 5)
    assert heavy[0]["train/loss"] == plain[0]["train/loss"]  # same weights: the same cross-entropy, bit for bit
    assert heavy[0]["train/z_raw"] == plain[0]["train/z_raw"] > 1  # measured without the stabilizer as well
    assert "train/z_loss" not in plain[0]
    assert heavy[0]["train/z_loss"] == pytest.approx(heavy[0]["train/z_raw"], rel=1e-6)  # weight 1
    assert heavy[0]["optim/grad_norm"] != plain[0]["optim/grad_norm"]
    assert abs(heavy[-1]["train/log_z_mean"]) < abs(plain[-1]["train/log_z_mean"])


def test_validation_never_contains_the_penalty(tiny_run):
    from stability_lab.diagnostics.probe import validate

    heavy = tiny_run("+stabilizer=zloss", "stabilizer.zloss.weight=1")
    plain = tiny_run()
    measured = [validate(run.model, run.objective, run.eval_windows, 4, 1) for run in (heavy, plain)]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_with_unequal_numbers_of_valid_tokens(tiny_run, accumulation):
    # Windows of two ids have one target each, so that targets can be ignored without touching the inputs.
    tokens = torch.tensor([[1, 2], [3, IGNORE], [5, IGNORE], [7, IGNORE], [9, 1], [4, 4], [8, 2], [6, 3]])
    results = []
    for accum in (1, accumulation):
        run = tiny_run(
            "+stabilizer=zloss",
            "stabilizer.zloss.weight=0.1",
            f"trainer.micro_batch_size={8 // accum}",
            f"trainer.grad_accum_steps={accum}",
        )
        row = run.step(run.objective.batch(tokens, 0), 1e-3)
        results.append([row, *(p.grad for p in run.step.update.parameters)])
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-7)


def test_step_without_a_valid_token_is_no_divergence(tiny_run, train_steps):
    run = tiny_run("+stabilizer=zloss")
    row = run.step(run.objective.batch(torch.tensor([[1, IGNORE]] * 4), 0), 1e-3)
    assert row.isfinite().all()
    assert row[0] == 0
    assert not run.step.stopped
    assert all(math.isfinite(v) for v in train_steps(run, 1)[0].values())


@pytest.mark.parametrize("weight", [-1e-4, math.inf, math.nan])
def test_bad_weights_are_refused(weight):
    with pytest.raises(ValueError, match=r"^weight="):
        ZLoss(weight)
