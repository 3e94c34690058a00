"""Operators that do nothing, are done twice, or are done to be undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    has_effect,
    is_call,
    is_float,
    is_random,
    is_tensor,
    only_user,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.normalise import aliases_placeholder

VIEWS = (
    aten.view,
    aten.reshape,
    aten.expand,
    aten.flatten,
    aten.squeeze,
    aten.unsqueeze,
    aten.permute,
    aten.transpose,
)


def remove_unused(editor: Editor) -> int:
    """Remove results that nobody reads, such as the averaged weights of an attention module.

    Conditions: the operator has no effect on buffers; a random one goes only when no random one that is read
    follows, so that every draw stays the same.
    """
    return editor.sweep()


def remove_noops(editor: Editor) -> int:
    """Remove dropout that drops nothing, `* 1`, `+ 0`, copies of what is already so, and views that change nothing.

    Conditions: dropout has p = 0 or is in eval mode; a copy of an input or parameter that is returned stays a
    copy, because outputs must own their storage; dtype and shape stay.
    """
    count = 0
    for node in editor.nodes():
        if node._erased or not is_tensor(node) or has_effect(node) or not node.args or not is_tensor(node.args[0]):
            continue
        source = node.args[0]
        if isinstance(source, fx.Node) and _is_noop(node, source) and not is_random(node):
            editor.replace(node, source)
            count += 1
    return count


def _is_noop(node: fx.Node, source: fx.Node) -> bool:
    if value(node).dtype != value(source).dtype or shape(node) != shape(source):
        return False
    if is_call(node, aten.dropout, aten.feature_dropout, aten.alpha_dropout):
        return not argument(node, "train") or float(argument(node, "p")) == 0.0
    if is_call(node, aten.mul, aten.div) and len(node.args) == 2:
        return scalar(node.args[1]) == 1.0
    if is_call(node, aten.add, aten.sub) and len(node.args) == 2:
        return scalar(node.args[1]) == 0.0 and not is_tensor(node.args[1])
    if is_call(node, aten.pow):
        return scalar(node.args[1]) == 1.0
    if is_call(node, *VIEWS):
        return value(node).stride() == value(source).stride()
    if is_call(node, aten.slice):
        return True
    if is_call(node, aten.clone, aten.contiguous, aten.to, aten._to_copy):
        return value(node).stride() == value(source).stride() and not aliases_placeholder(source)
    return False


def compose_views(editor: Editor) -> int:
    """Join two reshapes, and drop two permutations that undo each other.

    Conditions: the outer operator is a reshape of a reshape, or the two permutations compose to the identity.
    """
    count = 0
    reshapes = (aten.view, aten.reshape, aten.flatten, aten._unsafe_view)
    for node in editor.nodes(*reshapes, aten.unsqueeze, aten.squeeze):
        inner = node.args[0]
        if node._erased or not isinstance(inner, fx.Node) or not is_call(inner, *reshapes, aten.unsqueeze, aten.squeeze):
            continue
        if not is_tensor(inner.args[0]) or not value(inner.args[0]).is_contiguous():  # type: ignore[arg-type]
            continue
        editor.replace(node, editor.call(node, aten.reshape.default, inner.args[0], list(shape(node))))
        count += 1
    for node in editor.nodes(aten.permute, aten.transpose, aten.t):
        inner = node.args[0]
        if node._erased or not isinstance(inner, fx.Node) or not is_call(inner, aten.permute, aten.transpose, aten.t):
            continue
        outer_order, inner_order = _order(node), _order(inner)
        if [inner_order[dim] for dim in outer_order] == list(range(len(inner_order))):
            editor.replace(node, inner.args[0])  # type: ignore[arg-type]
            count += 1
    return count


def _order(node: fx.Node) -> list[int]:
    rank = len(shape(node))
    if is_call(node, aten.permute):
        return [dim % rank for dim in argument(node, "dims")]
    order = list(range(rank))
    first, second = (0, rank - 1) if is_call(node, aten.t) else (argument(node, "dim0"), argument(node, "dim1"))
    order[first], order[second] = order[second], order[first]
    return order


def share_common_subexpressions(editor: Editor) -> int:
    """Compute equal subexpressions once.

    Conditions: the operator is a function of its arguments: not random, without effect on buffers, not a
    factory of uninitialised memory.
    """
    count = 0
    seen: dict[Any, fx.Node] = {}
    for node in editor.nodes():
        if has_effect(node) or is_random(node) or not isinstance(node.target, object) or "empty" in str(node.target):
            continue
        key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            editor.graph.erase_node(node)
            count += 1
    return count


def _key(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return tuple(map(_key, item))
    return (type(item).__name__, item) if isinstance(item, int | float) else item


def polynomial(editor: Editor) -> int:
    """`x + x` is `2 x`, `c x + x` is `(c + 1) x`, and small integer powers are products.

    Conditions: floating point; both terms have the same shape and type; the scaled term has no other reader.
    """
    count = 0
    for node in editor.nodes(aten.add):
        if node._erased or node.kwargs or len(node.args) != 2 or not is_float(node):
            continue
        left, right = (_term(item) for item in node.args)
        if left is None or right is None or left[0] is not right[0]:
            continue
        editor.replace(node, editor.call(node, aten.mul.Tensor, left[0], left[1] + right[1]))
        count += 1
    for node in editor.nodes(aten.pow):
        exponent = scalar(node.args[1]) if len(node.args) > 1 and not is_tensor(node.args[1]) else None
        if node._erased or exponent not in (2.0, 3.0, 0.5, -1.0) or not is_tensor(node.args[0]) or not is_float(node):
            continue
        source = node.args[0]
        if exponent == 0.5:
            result = editor.call(node, aten.sqrt.default, source)
        elif exponent == -1.0:
            result = editor.call(node, aten.reciprocal.default, source)
        else:
            result = editor.call(node, aten.mul.Tensor, source, source)
            if exponent == 3.0:
                result = editor.call(node, aten.mul.Tensor, result, source)
        if value(result).dtype == value(node).dtype:
            editor.replace(node, result)
            count += 1
    return count


def _term(item: Any) -> tuple[fx.Node, float] | None:
    """`item` as a constant multiple of a node."""
    if not isinstance(item, fx.Node) or not is_tensor(item):
        return None
    if is_call(item, aten.mul) and len(item.args) == 2 and only_user(item) is not None:
        number = scalar(item.args[1])
        source = item.args[0]
        if number is not None and isinstance(source, fx.Node) and value(source).dtype == value(item).dtype:
            return source, number
    return item, 1.0


def strength_reduction(editor: Editor) -> int:
    """Divide by a constant as a product, and by a square root as a product with `rsqrt`.

    Conditions: floating point; the constant is finite and not zero, and so is its reciprocal; the root has no
    other reader. The result differs by at most one rounding.
    """
    count = 0
    for node in editor.nodes(aten.div):
        if node._erased or node.kwargs or len(node.args) != 2 or not is_tensor(node.args[0]) or not is_float(node):
            continue
        source, divisor = node.args
        assert isinstance(source, fx.Node)
        number = scalar(divisor)
        if number and not is_tensor(divisor) and 1e-30 < abs(number) < 1e30 and is_float(source):
            editor.replace(node, editor.call(node, aten.mul.Tensor, source, 1.0 / number))
            count += 1
        elif isinstance(divisor, fx.Node) and is_call(divisor, aten.sqrt) and only_user(divisor) is not None:
            root = editor.call(node, aten.rsqrt.default, divisor.args[0])
            if value(root).dtype == value(node).dtype and torch.is_floating_point(value(divisor.args[0])):  # type: ignore[arg-type]
                editor.replace(node, editor.call(node, aten.mul.Tensor, source, root))
                count += 1
    return count
