"""What a module keeps from one call to the next is found and named, and nothing else is."""

from __future__ import annotations

import types
from collections import deque

import pytest
import torch
from torch import nn

from kernelwright.tasks.carried import carried


class Keeper(nn.Module):
    """Keeps what `call` does with it."""

    def __init__(self, call, **kept):
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("sums", torch.zeros(3))
        for name, value in kept.items():
            setattr(self.part, name, value)
        self.call = call

    def forward(self, x):
        return self.call(self.part, x)


def counted(part, x):
    part.calls += 1
    return x * (part.calls % 4)


def smoothed(part, x):
    part.sums.lerp_(x, 0.5)
    return part.sums.clone()


def remembered(part, x):
    part.seen.append(x)
    return sum(part.seen)


def replaced(part, x):
    before, part.last = part.last, x
    return x - before


def written(part, x):
    part.box.values[0] += x
    return part.box.values[0].clone()


def made_once(part, x):
    if part.table is None:
        part.table = torch.arange(3.0)
    return x + part.table


def counted_only(part, x):
    part.calls += 1
    part.sums += 1
    return x * 2


STATES = {
    "a counter": (Keeper(counted, calls=0), ["part.calls"]),
    "a buffer": (Keeper(smoothed), ["part.sums"]),
    "a cache in a list": (Keeper(remembered, seen=[]), ["part.seen"]),
    "a window": (Keeper(remembered, seen=deque(maxlen=2)), ["part.seen"]),
    "the last input": (Keeper(replaced, last=torch.zeros(3)), ["part.last"]),
    "an object": (Keeper(written, box=types.SimpleNamespace(values=[torch.zeros(3)])), ["part.box"]),
    "made once": (Keeper(made_once, table=None), []),
    "counted and not used": (Keeper(counted_only, calls=0), []),
    "statistics of a norm": (nn.BatchNorm1d(3), []),
    "dropout": (nn.Dropout(0.5), []),
    "nothing": (nn.Linear(3, 3), []),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_shows_is_named(what):
    model, names = STATES[what]
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    rows = isinstance(model, nn.BatchNorm1d | nn.Dropout)

    def answer(same):
        torch.manual_seed(0)
        given = x if same else y
        with torch.no_grad():
            return [model(given if rows else given[0])]

    assert carried(model, answer) == names
