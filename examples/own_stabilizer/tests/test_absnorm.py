import torch
from own_stabilizer.absnorm import AbsNorm

from stability_lab.testing import check_stabilizer


def test_it_holds_what_every_stabilizer_holds():
    check_stabilizer("absnorm")


def test_the_mean_absolute_value_of_the_output_is_one():
    y = AbsNorm(eps=1e-12)(torch.tensor([[1.0, -2.0, 3.0, -4.0]]) * 100)
    torch.testing.assert_close(y.abs().mean(-1), torch.ones(1))
