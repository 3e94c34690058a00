"""Replaces attention with materialised scores by the one operator that need not store them, and lays out what it reads."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dtype,
    is_call,
    is_tensor,
    operand_nodes,
    read_once,
    scalar,
    shape,
    stretch_of,
    value,
)
from kernelwright.rewrites.helpers import heads_inside_on_gpu
from kernelwright.rewrites.rules.affine import affine
from kernelwright.rewrites.rules.base import each

CONSTANT_OPERATORS = (
    aten.ones,
    aten.full,
    aten.arange,
    aten.zeros,
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


LEAST_WIDE_HEAD = 512
"""Length of queries from which on attention is two products: the scores are few beside the arithmetic that makes them."""


@each(aten.scaled_dot_product_attention)
def wide_attention(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Attention of long queries is two products and a softmax, each of which has faster kernels than the whole.

    Conditions: queries of at least `LEAST_WIDE_HEAD` numbers; no mask, dropout or sharing of keys. Rounding differs. A
    result that is handed out lies as PyTorch's own.
    """
    query, key, values = node.args[:3]
    others = (argument(node, name) for name in ("attn_mask", "dropout_p", "is_causal", "enable_gqa"))
    if not all(map(is_tensor, (query, key, values))) or any(others):
        return None
    width = shape(cast(fx.Node, query))[-1]
    if width < LEAST_WIDE_HEAD:
        return None
    scale = argument(node, "scale")
    products = editor.call(node, aten.matmul.default, query, editor.call(node, aten.transpose.int, key, -2, -1))
    scores = editor.call(node, aten.mul.Tensor, products, 1 / math.sqrt(width) if scale is None else float(scale))
    result = editor.call(node, aten.matmul.default, editor.call(node, aten.softmax.int, scores, -1), values)
    if any(user.op == "output" for user in node.users) and _lies_heads_inside(cast(fx.Node, query), cast(fx.Node, values)):
        result = editor.call(node, heads_inside_on_gpu, result)
    return result if shape(result) == shape(node) else None


def _lies_heads_inside(query: fx.Node, values: fx.Node) -> bool:
    """Whether PyTorch attends to such long queries by its memory-efficient kernel on a GPU: the others take 256 numbers at
    most, and what is not aligned for any is computed by products."""
    whole = all(shape(one)[-1] * value(one).element_size() % 16 == 0 for one in (query, values))
    return whole and len(shape(query)) == 4 and dtype(query) in (torch.float32, torch.float16, torch.bfloat16)


@each(aten.matmul, aten.bmm)
def attention(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`softmax(q @ k.T * scale + mask) @ v` is scaled dot-product attention.

    Conditions: queries shorter than `LEAST_WIDE_HEAD`; the softmax runs over the keys; scores and weights have no other
    reader; no dropout in between. A mask that is module state or an input is handed over and read in each call; only a mask
    that `forward` itself makes from constants may be recognised as causal. Rows whose keys are all masked, which the
    reference makes NaN, may differ.
    """
    weights, values = operand_nodes(node) or (None, None)
    weights = read_once(weights, aten.softmax, aten._softmax)
    if weights is None or values is None or argument(weights, "dim") not in (-1, len(shape(weights)) - 1):
        return None
    found = _scores(weights.args[0])
    if found is None or dtype(weights) != dtype(node) or len(shape(node)) not in (3, 4):
        return None
    query, transposed, scale, masks = found
    if len(masks) > 1 or shape(query)[-1] >= LEAST_WIDE_HEAD or not _fits(query, transposed, values):
        return None
    key = editor.call(node, aten.transpose.int, transposed, -2, -1)
    mask, extra = None, {"scale": scale}
    if masks:
        kind, item = masks[0]
        if _is_causal(kind, item, shape(query)[-2], shape(key)[-2]):
            extra["is_causal"] = True
        else:
            mask = editor.call(node, aten.logical_not.default, item) if kind == "hide" else item
            # A mask of rank 2 to 4 broadcasts; the operator wants at least two dimensions.
            if dtype(mask) not in (torch.bool, dtype(query)) or len(shape(mask)) < 2:
                return None
    result = editor.call(node, aten.scaled_dot_product_attention.default, query, key, values, mask, **extra)
    return result if shape(result) == shape(node) else None


def _is_causal(kind: str, mask: fx.Node, rows: int, columns: int) -> bool:
    """Whether a mask is made from constants and hides from every query exactly the later keys."""
    constant = _evaluate(mask)
    if constant is None or rows != columns:
        return False
    seen = ~constant if kind == "hide" else constant == 0
    square = torch.ones(rows, columns, dtype=torch.bool).tril()
    hidden_is_infinite = kind == "hide" or bool((constant[~seen] == -math.inf).all())
    return seen.reshape(-1, rows, columns).eq(square).all().item() is True and hidden_is_infinite


def _scores(item: Any) -> tuple[fx.Node, fx.Node, float, list[tuple[str, Any]]] | None:
    """Read scores back to `(query, transposed key, scale, masks)`, where a mask hides keys or is added."""
    scale = 1.0
    masks: list[tuple[str, Any]] = []
    while read_once(item):
        step = affine(item)
        if step and step.shift == 0.0 and step.scale > 0:
            scale, item = scale * step.scale, step.source
            continue
        if is_call(item, aten.masked_fill) and scalar(item.args[2]) == -math.inf and is_tensor(item.args[1]):
            masks.append(("hide", item.args[1]))
            item = item.args[0]
            continue
        # An added mask outside the factor is what the operator does; inside it, the mask would be scaled too.
        if scale == 1.0 and not masks and (pair := operand_nodes(item, aten.add)):
            item, mask = pair
            masks.append(("add", mask))
            continue
        break
    pair = operand_nodes(read_once(item), aten.matmul, aten.bmm)
    if pair is None:
        return None
    query, transposed = pair
    # PyTorch's own multi-head attention scales the query; the operator does that at no cost.
    while (step := affine(query)) and step.shift == 0.0:
        scale, query = scale * step.scale, step.source
    return query, transposed, scale, masks


@each(aten.add)
def rotate_before_transpose(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A rotary embedding of `x.transpose(1, 2)` is the transpose of one of x, which a kernel reads and writes in order.

    The embedding is `q * cos + cat([-q[..., h:], q[..., :h]], -1) * sin`. Conditions: four dimensions; no other reader of
    either product; the result has the strides of the reference's.
    """
    terms = [read_once(item, aten.mul) for item in operand_nodes(node) or ()]
    for one, two in (terms, terms[::-1]) if len(terms) == 2 else ():
        for (query, cosine), (turned, sine) in itertools.product(_either_way(one), _either_way(two)):
            if not _is_transposed(query) or not _swaps_halves(turned, query) or shape(query) != shape(node):
                continue
            source, half = cast(fx.Node, query.args[0]), shape(query)[-1] // 2
            factors = [_before_transpose(editor, node, item) for item in (cosine, sine)]
            if None in factors:
                continue
            last = editor.call(node, aten.neg.default, editor.call(node, aten.slice.Tensor, source, 3, half, 2 * half))
            first = editor.call(node, aten.slice.Tensor, source, 3, 0, half)
            other = editor.call(node, aten.cat.default, [last, first], 3)
            parts = [editor.call(node, aten.mul.Tensor, *pair) for pair in zip((source, other), factors, strict=True)]
            result = editor.call(node, aten.transpose.int, editor.call(node, aten.add.Tensor, *parts), 1, 2)
            if dtype(result) == dtype(node) and value(result).stride() == value(node).stride():
                return result
    return None


def _either_way(product: fx.Node | None) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """Both orders of a product's factors."""
    pair = operand_nodes(product)
    return (pair, pair[::-1]) if pair else ()


def _is_transposed(node: fx.Node) -> bool:
    """Whether a tensor (batch, heads, length, width) is a view of one (batch, length, heads, width)."""
    if not is_call(node, aten.transpose) or len(shape(node)) != 4:
        return False
    return {int(argument(node, name)) % 4 for name in ("dim0", "dim1")} == {1, 2}


def _swaps_halves(node: fx.Node, query: fx.Node) -> bool:
    """Whether a tensor is the last half of a query, negated, before its first half."""
    if not is_call(node, aten.cat) or len(node.users) > 1 or int(argument(node, "dim")) % 4 != 3:
        return False
    half = shape(query)[-1] // 2
    parts = argument(node, "tensors")
    if len(parts) != 2 or (negated := read_once(parts[0], aten.neg)) is None or shape(node) != shape(query):
        return False
    pieces = [cast(fx.Node, negated.args[0]), parts[1]]
    return [stretch_of(piece, 3) for piece in pieces] == [(query, half), (query, 0)] and all(
        shape(piece)[-1] == half for piece in pieces
    )


def _before_transpose(editor: Editor, at: fx.Node, factor: fx.Node) -> fx.Node | None:
    """A factor that broadcasts to (batch, heads, length, width), for a tensor (batch, length, heads, width)."""
    if is_call(factor, aten.unsqueeze) and len(shape(factor)) == 4 and int(argument(factor, "dim")) % 4 == 1:
        return editor.call(at, aten.unsqueeze.default, factor.args[0], 2)
    if len(shape(factor)) == 4:
        return editor.call(at, aten.transpose.int, factor, 1, 2)
    return editor.call(at, aten.unsqueeze.default, factor, 1) if len(shape(factor)) == 2 else None


def _fits(query: fx.Node, transposed: fx.Node, values: fx.Node) -> bool:
    same = dtype(query) == dtype(transposed) == dtype(values)
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
