"""Removes operators that do nothing, are done twice, or are done to be undone."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dtype,
    has_effect,
    is_call,
    is_float,
    is_random,
    is_tensor,
    number,
    operands,
    read_once,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.normalise import aliases_placeholder
from kernelwright.rewrites.rules.base import each

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
RESHAPES = (aten.view, aten.reshape, aten.flatten, aten._unsafe_view, aten.unsqueeze, aten.squeeze)
PERMUTATIONS = (aten.permute, aten.transpose, aten.t)


def remove_unused(editor: Editor) -> int:
    """Remove results that nobody reads, such as the averaged weights of an attention module.

    Conditions: the operator has no effect on buffers; a random one goes only when no random one that is read
    follows, so that every draw stays the same.
    """
    return editor.sweep()


@each()
def remove_noops(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Remove dropout that drops nothing, `* 1`, `+ 0`, copies of what is already so, and views that change nothing.

    Conditions: dropout has p = 0 or is in eval mode; a copy of an input or parameter that is returned stays a
    copy, because outputs must own their storage; dtype and shape stay.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_tensor(node):
        return None
    return source if _is_noop(node, source) and not has_effect(node) and not is_random(node) else None


def _is_noop(node: fx.Node, source: fx.Node) -> bool:
    if dtype(node) != dtype(source) or shape(node) != shape(source):
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


@each(*RESHAPES, *PERMUTATIONS)
def compose_views(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Join two reshapes, and drop two permutations that undo each other.

    Conditions: the outer operator is a reshape of a reshape, or the two permutations compose to the identity.
    """
    inner: Any = node.args[0]
    if is_call(node, *RESHAPES):
        joins = is_call(inner, *RESHAPES) and is_tensor(inner.args[0]) and value(inner.args[0]).is_contiguous()
        return editor.reshape(node, inner.args[0], shape(node)) if joins else None
    if not is_call(inner, *PERMUTATIONS):
        return None
    inner_order = _order(inner)
    undone = [inner_order[dim] for dim in _order(node)] == list(range(len(inner_order)))
    return cast(fx.Node, inner.args[0]) if undone else None


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
        if has_effect(node) or is_random(node) or "empty" in str(node.target):
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


@each(aten.add, aten.pow)
def polynomial(editor: Editor, node: fx.Node) -> fx.Node | None:
    """`x + x` is `2 x`, `c x + x` is `(c + 1) x`, and small integer powers are products.

    Conditions: floating point; both terms have the same shape and type; the scaled term has no other reader.
    """
    pair = operands(node)
    if pair is None or not is_float(node):
        return None
    if is_call(node, aten.pow):
        return _power(editor, node, *pair)
    left, right = map(_term, pair)
    if left is None or right is None or left[0] is not right[0]:
        return None
    return editor.call(node, aten.mul.Tensor, left[0], left[1] + right[1])


def _power(editor: Editor, node: fx.Node, base: Any, exponent: Any) -> fx.Node | None:
    power = number(exponent)
    if power not in (2.0, 3.0, 0.5, -1.0) or not is_tensor(base):
        return None
    if power in (0.5, -1.0):
        result = editor.call(node, aten.sqrt.default if power == 0.5 else aten.reciprocal.default, base)
    else:
        result = editor.call(node, aten.mul.Tensor, base, base)
        if power == 3.0:
            result = editor.call(node, aten.mul.Tensor, result, base)
    return result if dtype(result) == dtype(node) else None


def _term(item: Any) -> tuple[fx.Node, float] | None:
    """`item` as a constant multiple of a node."""
    if not isinstance(item, fx.Node) or not is_tensor(item):
        return None
    if read_once(item) and (pair := operands(item, aten.mul)):
        source, factor = pair[0], scalar(pair[1])
        if factor is not None and isinstance(source, fx.Node) and dtype(source) == dtype(item):
            return source, factor
    return item, 1.0


@each(aten.div)
def strength_reduction(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Divide by a constant as a product, and by a square root as a product with `rsqrt`.

    Conditions: floating point; the constant is finite and not zero, and so is its reciprocal; the root has no
    other reader. The result differs by at most one rounding.
    """
    source, divisor = operands(node) or (None, None)
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_float(node):
        return None
    constant = number(divisor)
    if constant and 1e-30 < abs(constant) < 1e30 and is_float(source):
        return editor.call(node, aten.mul.Tensor, source, 1.0 / constant)
    if (root := read_once(divisor, aten.sqrt)) is None:
        return None
    inverse = editor.call(node, aten.rsqrt.default, root.args[0])
    exact = dtype(inverse) == dtype(node) and is_float(argument(root, "self"))
    return editor.call(node, aten.mul.Tensor, source, inverse) if exact else None
