"""Whether two modules draw from one distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import dropout

from kernelwright.judge.check.draws import CALLS, are_alike, sampled

X = torch.linspace(-2, 2, 64 * 128).view(64, 128).sin() + 0.5


def alike(mine: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], rounding: float = 1e-6) -> bool:
    calls = [[sampled([one()], seed=1) for _ in range(CALLS)] for one in (mine, theirs)]
    return are_alike(calls[0], calls[1], rounding)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: dropout(X, 0.1),
        lambda: dropout(X, 0.1).bfloat16(),
        lambda: dropout(X, 0.1).sum(),
        lambda: torch.randn(40) / torch.randn(40),  # no mean, no variance
        lambda: torch.randint(9, (30,)),
        lambda: torch.where(torch.rand(9) < 0.5, torch.inf, 1.0),
        lambda: torch.complex(torch.rand(9), torch.rand(9)),
        lambda: torch.ones(0),
        lambda: X,
    ],
)
def test_what_draws_in_the_same_way_is_alike(draw):
    torch.manual_seed(0)
    assert sum(alike(draw, draw) for _ in range(5)) >= 4


@pytest.mark.parametrize(
    "draw",
    [
        lambda: X,
        lambda: dropout(X, 0.12),
        lambda: dropout(X, 0.1) * 0.9,
        lambda: X * dropout(torch.ones(128), 0.1),
        lambda: dropout(X, 0.1).clone().index_fill_(0, torch.tensor([5]), 0.0),
    ],
)
def test_another_mean_variance_or_covariance_is_not_alike(draw):
    torch.manual_seed(0)
    assert not any(alike(draw, lambda: dropout(X, 0.1)) for _ in range(5))


def test_a_constant_is_not_alike_a_number_that_is_drawn():
    torch.manual_seed(0)
    assert not alike(lambda: X.sum(), lambda: dropout(X, 0.1).sum())


def test_rounding_is_allowed_where_it_is_all():
    torch.manual_seed(0)
    assert alike(lambda: dropout(X, 0.1) * 1.004, lambda: dropout(X, 0.1), rounding=0.016)
    assert alike(lambda: X * 1.004, lambda: X, rounding=0.016)
    assert not alike(lambda: X * 1.004, lambda: X)


def test_each_output_counts_as_much_as_a_larger_one():
    torch.manual_seed(0)
    right, wrong = ([sampled([dropout(X, 0.1), torch.tensor(count)], 1) for _ in range(CALLS)] for count in (1, 0))
    assert are_alike(right, right, 1e-6)
    assert not are_alike(wrong, right, 1e-6)
