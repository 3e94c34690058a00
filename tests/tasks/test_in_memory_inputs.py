"""Fresh inputs are like the examples: every value is one of theirs, and what is a mask or a position stays."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.errors import ModelError
from kernelwright.tasks.in_memory.inputs import InputDraws, Inputs, call_of


def forward(*tensors):
    return tensors


def draws_of(*sets):
    return InputDraws([call_of(inspect.signature(forward), Inputs(*one), "Net") for one in sets], "Net")


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]))
def test_fresh_values_are_the_examples_own(seed, dtype):
    torch.manual_seed(seed)
    example = (torch.randn(4, 9) * 50).to(dtype).t()
    draws = draws_of((example,))
    first, second = draws.draw()[0], draws.draw()[0]
    assert (first.shape, first.dtype, first.stride()) == (example.shape, dtype, example.stride())
    assert not torch.equal(first, second)
    assert torch.isin(first.double(), example.double()).all()


def test_masks_flags_positions_and_zeros_stay():
    noise = torch.randn(3, 8)
    kept = [
        torch.rand(3, 8) > 0.5,
        torch.tensor([[0, 1, 1], [1, 1, 0]]),
        torch.arange(8).expand(3, 8),
        torch.full((4, 4), -torch.inf).triu(1) + torch.randn(4, 4),
        torch.zeros(2, 3),
        torch.tensor(7),
    ]
    triangle = torch.randn(8, 8).tril()
    drawn = draws_of((noise, triangle, *kept)).draw()
    assert not torch.equal(drawn[0], noise)
    assert torch.equal(drawn[1] == 0, triangle == 0)
    assert not torch.equal(drawn[1], triangle)
    assert all(torch.equal(*pair) for pair in zip(drawn[2:], kept, strict=True))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 9)[:, :5],
        torch.randn(6, 4).mT,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        (torch.rand(8) > 0.5).expand(4, 8),
        torch.randn(6, 4).to(torch.float8_e4m3fn).mT,
    ],
    ids=["slice", "transposed", "channels last", "expanded", "eight bits"],
)
def test_fresh_inputs_lie_in_memory_as_the_examples_do(x):
    (_, fresh) = draws_of((torch.randn(4), x)).draw()
    assert (fresh.stride(), fresh.dtype) == (x.stride(), x.dtype)
    assert torch.isin(fresh.double(), x.double()).all()


def test_several_examples_of_one_form_are_drawn_from_together():
    sets = [(torch.randn(64) + shift, torch.tensor([shift > 0])) for shift in (-100, 100)]
    draws = draws_of(*sets)
    torch.manual_seed(0)
    drawn = [draws.draw() for _ in range(20)]
    assert {bool(flag) for _, flag in drawn} == {False, True}
    assert all((values < 0).any() and (values > 0).any() for values, _ in drawn)


@pytest.mark.parametrize("example", [torch.zeros(5), torch.ones(2, 2), torch.arange(9), torch.rand(4) > 0.5])
def test_examples_without_values_to_draw_from_are_refused(example):
    with pytest.raises(ModelError, match=r"Give real data, or torch.randn"):
        draws_of((example,))
