"""Lets the template of attention compute the scaled dot-product attention of an operator graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import torch
from torch import fx

from kernelwright.rewrites.graph import Editor, arguments, aten, contiguous_strides, dtype, is_tensor, number, shape, value
from kernelwright.rewrites.products import shared_names
from kernelwright.rewrites.templates import attention
from kernelwright.rewrites.templates.attention import Attention, AttentionKnobs
from kernelwright.rewrites.tracing import OperatorGraph

TILED = "tiled-attention"
"""The technique's name."""
OPERATORS = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
"""Operators of which a task has at least one if the technique can apply to it."""


class TiledAttention:
    """A function that computes one attention by the template, with a knob of choices for its sizes.

    Args:
        name: Of the Python function.
        choices: Knobs of the template, the default first; the source declares them (`records.knobs`).
        options: Factor of the scores, whether a query sees no later key, and whether the result lies in memory as
        [batch, queries, heads, width].
    """

    device_test = "is_cuda"

    def __init__(self, name: str, choices: tuple[AttentionKnobs, ...], options: tuple[float, bool, bool]) -> None:
        self.__name__ = name
        self.choices = choices
        self.options = options

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The answers to fake tensors."""
        if self.options[-1]:
            batch, heads, queries, _ = q.shape
            return q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    def definition(self) -> str:
        """The function and its knobs, which the template's text comes before."""
        name, knobs = self.__name__, f"KNOBS_{self.__name__.upper()}"
        tiles = tuple(asdict(one) for one in self.choices)
        options = ", ".join(map(repr, self.options))
        return (
            f'{knobs} = {{"tile": {tiles!r}}}\n\n\n'
            f'def {name}(q, k, v, mask=None):\n    return tiled_attention(q, k, v, mask, {options}, {knobs}["tile"][0])\n'
        )

    @staticmethod
    def prologue(kernels: Sequence[TiledAttention]) -> str:
        """The template's text without its docstring."""
        return attention.emit(kernels[0].choices[0]).split('"""', 2)[2]


def clash(source: str) -> set[str]:
    """Names at the module level of a task's text that the template's text also has."""
    return shared_names(source, [attention.emit(AttentionKnobs())])


def replace_attention(*graphs: OperatorGraph) -> int:
    """Let the template compute each attention that it takes, in place; how many there were. Equal ones share a function."""
    made: dict[tuple[object, ...], TiledAttention] = {}
    return sum(_replace(Editor(graph.graph, graph.mode), made) for graph in graphs)


def _replace(editor: Editor, made: dict[tuple[object, ...], TiledAttention]) -> int:
    count = 0
    for node in editor.nodes(aten.scaled_dot_product_attention):
        sizes = sizes_of(node)
        if sizes is None or attention.refusal(sizes) is not None:
            continue
        given = arguments(node)
        scale = number(given["scale"]) or 1 / math.sqrt(sizes.width)
        choices = attention.alternatives(sizes)
        options = (scale, bool(given["is_causal"]), _heads_inside(value(node)))
        kernel = made.setdefault((choices, options), TiledAttention(f"tiled_attention_{len(made)}", choices, options))
        operands = [given["query"], given["key"], given["value"]]
        operands += [given["attn_mask"]] if given["attn_mask"] is not None else []
        editor.replace(node, editor.call(node, kernel, *operands))
        count += 1
    editor.sweep()
    editor.graph.lint()
    return count


def sizes_of(node: fx.Node) -> Attention | None:
    """Sizes of an attention without dropout or shared keys, of operands of one type; None of another."""
    given = arguments(node)
    operands = [given["query"], given["key"], given["value"]]
    if not all(map(is_tensor, operands)) or given["dropout_p"] or given["enable_gqa"]:
        return None
    query, key, values = (shape(one) for one in operands)
    kinds = {dtype(one) for one in operands}
    if len(query) not in (3, 4) or not query[:-2] == key[:-2] == values[:-2] or len(kinds) > 1:
        return None
    scale, mask = given["scale"], cast(fx.Node | None, given["attn_mask"])
    # The highest score is looked for before it is scaled.
    if scale is not None and not 0 < (number(scale) or 0.0) < math.inf:
        return None
    if mask is not None and (given["is_causal"] or dtype(mask) not in (torch.bool, *kinds)):
        return None
    return Attention(
        heads=math.prod(query[:-2]),
        queries=query[-2],
        keys=key[-2],
        width=query[-1],
        width_v=values[-1],
        dtype=str(*kinds).removeprefix("torch."),
    )


def _heads_inside(result: torch.Tensor) -> bool:
    """Whether a result lies as PyTorch's does for queries whose heads lie side by side, so that merging them is a view."""
    if result.dim() != 4:
        return False
    inner = result.transpose(1, 2)
    return not result.is_contiguous() and inner.stride() == contiguous_strides(tuple(inner.shape))
