"""Infers shapes of recurrent layers without walking through their time steps.

On fake tensors PyTorch decomposes an LSTM or GRU into one set of operators per step and layer, only to learn
the shape of the result: a minute for 512 steps of 6 layers. While this context is open, a layer is one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._decomp import decompositions


def _lstm_layer(inp: Any, hidden: Any, params: Any, has_biases: bool, reverse: bool = False) -> Any:
    return _outputs(inp, hidden[0]), tuple(torch.empty_like(state) for state in hidden)


def _rnn_layer(inp: Any, hidden: Any, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False) -> Any:
    return _outputs(inp, hidden), torch.empty_like(hidden)


def _outputs(inp: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One output of the state's size for each step and sequence."""
    return inp.new_empty((inp.shape[0], inp.shape[1], state.shape[-1]))


@contextlib.contextmanager
def without_steps() -> Iterator[None]:
    """Let fake recurrent layers know only their shapes; nothing changes where PyTorch has other internals."""
    replaced = {}
    for name, layer in (("one_layer_lstm", _lstm_layer), ("one_layer_rnn", _rnn_layer)):
        if hasattr(decompositions, name):
            replaced[name] = getattr(decompositions, name)
            setattr(decompositions, name, layer)
    try:
        yield
    finally:
        for name, layer in replaced.items():
            setattr(decompositions, name, layer)
