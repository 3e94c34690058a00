"""Nested values as a JSON skeleton and tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.judge.worker.structure import StructureError, flatten, unflatten

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text()
    | st.integers(0, 5).map(lambda size: torch.arange(size))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first is second
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return type(first) is type(second) and first == second


@given(VALUES)
def test_a_value_is_put_together_again_as_it_was(value):
    skeleton, tensors = flatten(value)
    assert same(unflatten(skeleton, tensors), value)


@given(VALUES)
def test_the_skeleton_survives_json(value):
    skeleton, tensors = flatten(value)
    assert same(unflatten(json.loads(json.dumps(skeleton)), tensors), value)


def test_tensors_come_in_reading_order_and_a_repeated_one_twice():
    a, b = torch.zeros(1), torch.ones(1)
    skeleton, tensors = flatten([b, {"x": (a, b)}, 3])
    assert [id(tensor) for tensor in tensors] == [id(b), id(a), id(b)]
    assert skeleton == {"list": [{"tensor": 0}, {"dict": {"x": {"tuple": [{"tensor": 1}, {"tensor": 2}]}}}, {"value": 3}]}


@pytest.mark.parametrize("strange", [object(), {1: 2}, {1, 2}, np.zeros(2), b"bytes", [range(3)], {"a": lambda: 0}])
def test_anything_else_is_named(strange):
    with pytest.raises(StructureError, match=r"^a \w"):
        flatten(strange)
