"""Cross-entropy and its measurements from one log-softmax in fp32."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from stability_lab.objective.loss import IGNORE, LossSums, language_model_loss
from stability_lab.seams import LossRecord

ONE = torch.tensor(1.0)


def random_case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(12, 7, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, 7, (12,), generator=generator)
    targets[::4] = IGNORE
    return logits, targets


class Term:
    """A function of the record as an auxiliary loss."""

    metric = "test"

    def __init__(self, function: Callable[[LossRecord], torch.Tensor]):
        self.function = function

    def __call__(self, record: LossRecord, /) -> torch.Tensor:
        return self.function(record)


ABS, SQUARE = Term(lambda record: record.log_z_N.abs()), Term(lambda record: record.log_z_N.square())


VALUES = ("objective", "ce", "term", "z_raw", "log_z", "log_z_max")


def flat(sums: LossSums) -> list[torch.Tensor]:
    """Of a loss with one term."""
    return [sums.objective, sums.ce, *sums.terms, sums.z_raw, sums.log_z, sums.log_z_max]


def test_a_term_sees_the_mean_and_the_largest_logit_and_the_embedding():
    logits, targets = random_case(torch.float64)
    valid, embedding = targets != IGNORE, torch.randn(logits.shape[1], 3, dtype=torch.float64, requires_grad=True)
    terms = [
        Term(lambda record: record.mean_logit_N().square()),
        Term(lambda record: record.max_logit_N()),
        Term(lambda record: record.unembedding_VD.mean(0).square().sum()),
    ]
    n = int(valid.sum())
    sums = language_model_loss(logits, targets, torch.tensor(1 / n, dtype=torch.float64), terms, embedding)
    sums.objective.backward()
    exact = logits.detach().requires_grad_()
    mean, largest = exact.mean(-1)[valid], exact.amax(-1)[valid]
    centre = embedding.detach().mean(0)
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORE) + mean.square().mean() + largest.mean()
    expected.backward()
    assert sums.objective.item() == pytest.approx(expected.item() + centre.square().sum().item())
    torch.testing.assert_close(logits.grad, exact.grad)
    # A penalty on the model as a whole counts once, however many tokens there are.
    assert embedding.grad is not None
    torch.testing.assert_close(embedding.grad, (2 * centre / len(embedding)).expand_as(embedding))


@pytest.mark.oracle
def test_equals_torch_cross_entropy():
    logits, targets = random_case()
    sums = language_model_loss(logits, targets, torch.tensor(1 / 9))
    (ours,) = torch.autograd.grad(sums.objective, logits)
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    (theirs,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(sums.objective, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.ce / 9, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_gradient_of_an_objective_with_a_term():
    logits, targets = random_case(torch.float64)
    inv_n = torch.tensor(1 / 9, dtype=torch.float64)

    def objective(logits: torch.Tensor) -> torch.Tensor:
        return language_model_loss(logits, targets, inv_n, [Term(lambda record: 0.1 * record.log_z_N.pow(3))]).objective

    assert torch.autograd.gradcheck(objective, (logits,))


def test_measurements_are_those_of_the_valid_tokens():
    logits, targets = random_case(torch.float64)
    log_z = torch.logsumexp(logits.detach(), -1)[targets != IGNORE]
    log_z[0] = -log_z.abs().max() - 50  # the largest |log Z| is a negative one
    first = int((targets != IGNORE).nonzero()[0])
    with torch.no_grad():
        logits[first] += log_z[0] - torch.logsumexp(logits[first], -1)
    sums = language_model_loss(logits, targets, ONE.double())
    assert sums.log_z.item() == pytest.approx(log_z.sum().item())
    assert sums.z_raw.item() == pytest.approx(log_z.square().sum().item())
    assert sums.log_z_max.item() == pytest.approx(-log_z[0].item())
    assert sums.terms == ()


def test_terms_add_up():
    logits, targets = random_case(torch.float64)
    one = language_model_loss(logits, targets, ONE.double(), [ABS])
    two = language_model_loss(logits, targets, ONE.double(), [ABS, SQUARE])
    assert one.terms[0].item() == pytest.approx(torch.logsumexp(logits, -1)[targets != IGNORE].abs().sum().item())
    assert two.terms[0] == one.terms[0]
    assert two.terms[1].item() == pytest.approx(two.z_raw.item())
    assert two.objective.item() == pytest.approx((two.ce + sum(two.terms)).item())
    assert one.ce == two.ce


def test_only_the_objective_carries_a_gradient():
    logits, targets = random_case()
    sums = language_model_loss(logits, targets, ONE, [SQUARE])
    values = dict(zip(VALUES, flat(sums), strict=True))
    assert [name for name, value in values.items() if value.requires_grad] == ["objective"]


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], requires_grad=True)
    sums = language_model_loss(logits, torch.tensor([0, 0]), ONE)
    sums.objective.backward()
    assert sums.ce.item() == 2e4
    assert sums.log_z_max.item() == 1e4
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0, 0], [-1, 1, 0]]


def test_constant_on_all_logits_changes_log_z_only():
    logits, targets = random_case(torch.float64)
    plain, shifted = (language_model_loss(logits + c, targets, ONE.double()) for c in (0.0, 3.0))
    assert shifted.ce.item() == pytest.approx(plain.ce.item(), abs=1e-9)
    assert (shifted.log_z - plain.log_z).item() == pytest.approx(3.0 * 9)


def test_bf16_logits_are_summed_in_fp32_inside_autocast():
    logits, targets = random_case(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        sums = language_model_loss(logits, targets, ONE, [SQUARE])
    exact = language_model_loss(logits.double(), targets, ONE.double(), [SQUARE])
    for name, low, high in zip(VALUES, flat(sums), flat(exact), strict=True):
        assert low.dtype == torch.float32, name
        assert low.item() == pytest.approx(high.item(), rel=1e-5), name


def test_nan_is_not_hidden():
    logits, targets = random_case()
    with torch.no_grad():
        logits[1, 2] = math.nan
    assert language_model_loss(logits, targets, ONE).ce.isnan()
    with torch.no_grad():
        logits[:] = 0
        logits[0, 2] = math.nan  # an ignored row
    assert language_model_loss(logits, targets, ONE).ce.isfinite()
