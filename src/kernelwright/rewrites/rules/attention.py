"""Attention with materialised scores, replaced by the one operator that need not store them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    is_call,
    is_tensor,
    only_user,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.rules.affine import affine

FACTORIES = (aten.ones, aten.full, aten.arange, aten.zeros)
CONSTANT_OPERATORS = (
    *FACTORIES,
    aten.tril,
    aten.triu,
    aten.eq,
    aten.ne,
    aten.lt,
    aten.le,
    aten.gt,
    aten.ge,
    aten.unsqueeze,
    aten.view,
    aten.to,
    aten._to_copy,
    aten.logical_not,
    aten.bitwise_not,
    aten.slice,
    aten.masked_fill,
    aten.expand,
    aten.reshape,
)


def attention(editor: Editor) -> int:
    """`softmax(q @ k.T * scale + mask) @ v` is scaled dot-product attention.

    Conditions: the softmax runs over the keys; scores and weights have no other reader; no dropout in between. A mask that
    is module state or an input is handed over and read in each call; only a mask that `forward` itself makes from constants
    may be recognised as causal. Rows whose keys are all masked, which the reference makes NaN, may differ.
    """
    count = 0
    for node in editor.nodes(aten.matmul, aten.bmm):
        if node._erased or len(node.args) != 2:
            continue
        weights, values = node.args
        if not isinstance(weights, fx.Node) or not isinstance(values, fx.Node) or only_user(weights) is None:
            continue
        if (
            not is_call(weights, aten.softmax, aten._softmax)
            or argument(weights, "dim") % len(shape(weights)) != len(shape(weights)) - 1
        ):
            continue
        found = _scores(weights.args[0])
        if found is None or value(weights).dtype != value(node).dtype or len(shape(node)) not in (3, 4):
            continue
        query, transposed, scale, masks = found
        if len(masks) > 1 or not _fits(query, transposed, values):
            continue
        key = editor.call(node, aten.transpose.int, transposed, -2, -1)
        mask, causal = None, False
        if masks:
            kind, item = masks[0]
            constant = _evaluate(item)
            rows, columns = shape(query)[-2], shape(key)[-2]
            if constant is not None and rows == columns:
                seen = ~constant if kind == "hide" else constant == 0
                square = torch.ones(rows, columns, dtype=torch.bool).tril()
                hidden_is_infinite = kind == "hide" or bool((constant[~seen] == -math.inf).all())
                causal = seen.reshape(-1, rows, columns).eq(square).all().item() is True and hidden_is_infinite
            if not causal:
                mask = editor.call(node, aten.logical_not.default, item) if kind == "hide" else item
                if value(mask).dtype not in (torch.bool, value(query).dtype):
                    continue
        extra: dict[str, Any] = {"scale": scale}
        if causal:
            extra["is_causal"] = True
        # A mask of rank 2 to 4 broadcasts; the operator wants at least two dimensions.
        if mask is not None and len(shape(mask)) < 2:
            continue
        result = editor.call(node, aten.scaled_dot_product_attention.default, query, key, values, mask, **extra)
        if shape(result) == shape(node):
            editor.replace(node, result)
            count += 1
    return count


def _scores(item: Any) -> tuple[fx.Node, fx.Node, float, list[tuple[str, Any]]] | None:
    """Read scores back to `(query, transposed key, scale, masks)`, where a mask hides keys or is added."""
    scale = 1.0
    masks: list[tuple[str, Any]] = []
    while isinstance(item, fx.Node) and only_user(item) is not None:
        step = affine(item)
        if step and step.shift == 0.0 and step.scale > 0:
            scale, item = scale * step.scale, step.source
            continue
        if is_call(item, aten.masked_fill) and scalar(item.args[2]) == -math.inf and is_tensor(item.args[1]):
            masks.append(("hide", item.args[1]))
            item = item.args[0]
            continue
        # An added mask outside the factor is what the operator does; inside it, the mask would be scaled too.
        if is_call(item, aten.add) and len(item.args) == 2 and not item.kwargs and scale == 1.0 and not masks:
            left, right = item.args
            if is_tensor(left) and is_tensor(right):
                masks.append(("add", right))
                item = left
                continue
        break
    if not isinstance(item, fx.Node) or not is_call(item, aten.matmul, aten.bmm) or only_user(item) is None:
        return None
    query, transposed = item.args
    if not isinstance(query, fx.Node) or not isinstance(transposed, fx.Node):
        return None
    # PyTorch's own multi-head attention scales the query; the operator does that at no cost.
    while (step := affine(query)) and step.shift == 0.0:
        scale, query = scale * step.scale, step.source
    return query, transposed, scale, masks


def _fits(query: fx.Node, transposed: fx.Node, values: fx.Node) -> bool:
    same = value(query).dtype == value(transposed).dtype == value(values).dtype
    ranks = {len(shape(query)), len(shape(transposed)), len(shape(values))}
    return same and len(ranks) == 1 and shape(transposed)[-1] == shape(values)[-2]


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value of a mask made from constants alone; None when it depends on anything else."""
    if node.op != "call_function" or not is_call(node, *CONSTANT_OPERATORS) or value(node).numel() > 1 << 24:
        return None
    arguments = []
    for item in node.args:
        result = _evaluate(item) if isinstance(item, fx.Node) else item
        if isinstance(item, fx.Node) and result is None:
            return None
        arguments.append(result)
    kwargs = {key: item for key, item in node.kwargs.items() if key not in ("device", "pin_memory")}
    result = node.target(*arguments, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) else None
