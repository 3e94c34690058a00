"""Asks for inputs that differ from earlier ones in a few elements only: a cache keyed by a digest confuses them."""

from __future__ import annotations

import functools

import torch

from kernelwright.judge.check.examiner import Examiner, PosedQuestion
from kernelwright.judge.check.facts import some_of
from kernelwright.tasks import InputSet
from kernelwright.tasks.input_sets import size_of


def check_similar_inputs(examiner: Examiner, first: PosedQuestion) -> None:
    """Inputs that differ from the first ones in the places of two elements, in a few elements, and in one."""
    examiner.earlier = first.question
    for name, vary, kept in (
        ("two-swapped", _swap, "a sum"),  # first: `first` was the latest call
        ("few-changed", functools.partial(_change, 0.02), "a sample"),
        ("one-changed", functools.partial(_change, 0.0), "a sample"),
    ):
        with examiner.trial.findings.skipping(name):
            examiner.ask(InputSet(name, vary, f"caches keyed by {kept}", truths=True), slot=1, base=first.question.inputs)


def _change(share: float, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move a share of the elements, or just one when it is 0, by several times the tensor's size; of booleans, turn them.

    Zeros among other elements stay, as in all input sets: a triangular matrix may be what the task is about.
    """
    if x.numel() == 0:
        return x
    movable = x != 0
    if x.dtype == torch.bool or not movable.any():
        movable = torch.ones_like(movable)
    if share == 0:
        place = torch.rand(x.shape, generator=generator, device=x.device).masked_fill_(~movable, -1.0).argmax()
        chosen = torch.zeros_like(movable)
        chosen.view(-1)[place] = True
    else:
        chosen = some_of(x, share, generator) & movable
    if x.dtype == torch.bool:
        return x ^ chosen
    size = size_of(x)
    # What is all zero, such as an initial state, says nothing of its size; it must be seen beside others.
    size = torch.where(size == 0, 1.0, size.clamp_min(1e-3)).to(x.dtype)
    return torch.add(x, chosen, alpha=6 * size.item())


_SWAP_TRIES = 4096
"""Places among which two are looked for to swap: a list of all places of a large input takes more memory than the input."""


def _swap(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Let two elements that differ change places, neither of them zero: a triangle stays one."""
    if x.numel() < 2:
        return x
    tried = torch.randint(x.numel(), (_SWAP_TRIES,), generator=generator, device=x.device)
    found = x.reshape(-1)[tried]
    places = tried[found != 0]
    others = tried[(found != 0) & (found != found[found != 0][:1])] if len(places) else places
    if not len(others):
        return x
    first, second = places[0], others[0]
    swapped = x.clone(memory_format=torch.contiguous_format).view(-1)
    swapped[first], swapped[second] = x.reshape(-1)[second], x.reshape(-1)[first]
    return swapped.view(x.shape)
