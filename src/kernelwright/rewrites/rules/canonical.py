"""Removes what does nothing, and writes composites, losses and distances in operators that other rules and kernels know."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    Operator,
    argument,
    arguments,
    aten,
    dims_of,
    dtype,
    has_effect,
    is_call,
    is_float,
    is_random,
    is_tensor,
    number,
    numel,
    operand_nodes,
    operands,
    overload,
    read_once,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.rules.affine import affine
from kernelwright.rewrites.rules.base import each
from kernelwright.rewrites.tracing import aliases_placeholder

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
    """Remove results that are not read, such as the averaged weights of an attention module.

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
        return _integer_power(editor, node, *pair)
    left, right = map(_term, pair)
    if left is None or right is None or left[0] is not right[0]:
        return None
    return editor.call(node, aten.mul.Tensor, left[0], left[1] + right[1])


def _integer_power(editor: Editor, node: fx.Node, base: Any, exponent: Any) -> fx.Node | None:
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


class Product(NamedTuple):
    """A product flattened into a constant and its factors."""

    constant: float
    factors: tuple[fx.Node, ...]


def product(node: fx.Node) -> Product:
    """Flatten nested multiplications and divisions by constants."""
    left, right = operands(node, aten.mul, aten.div) or (None, None)
    if isinstance(left, fx.Node) and (factor := number(right)):
        inner = product(left)
        return Product(inner.constant * (factor if is_call(node, aten.mul) else 1.0 / factor), inner.factors)
    if is_call(node, aten.mul) and isinstance(left, fx.Node) and isinstance(right, fx.Node):
        one, two = product(left), product(right)
        return Product(one.constant * two.constant, one.factors + two.factors)
    return Product(1.0, (node,))


def _near(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-6)


def _plus(node: object, shift: float) -> fx.Node | None:
    """`source` when `node` is `source + shift`."""
    found = affine(node)
    return found.source if found and found.scale == 1.0 and _near(found.shift, shift) else None


def _times(node: object, scale: float) -> fx.Node | None:
    """`source` when `node` is `source * scale`."""
    found = affine(node)
    return found.source if found and found.shift == 0.0 and _near(found.scale, scale) else None


def _source(node: fx.Node | None, *packets: object) -> fx.Node | None:
    """The first argument when `node` is a call of one of these operators."""
    source = node.args[0] if node is not None and is_call(node, *packets) else None
    return source if isinstance(source, fx.Node) else None


def _clamped(node: fx.Node) -> tuple[fx.Node, float, float] | None:
    if is_call(node, aten.hardtanh):
        low, high = argument(node, "min_val"), argument(node, "max_val")
    elif is_call(node, aten.clamp):
        low, high = argument(node, "min"), argument(node, "max")
    elif is_call(node, aten.relu6):
        low, high = 0.0, 6.0
    else:
        return None
    low, high = scalar(low), scalar(high)
    source = node.args[0]
    return (source, low, high) if isinstance(source, fx.Node) and low is not None and high is not None else None


def _silu(found: Product, x: fx.Node, other: fx.Node) -> bool:
    return found.constant == 1.0 and _source(other, aten.sigmoid) is x


def _mish(found: Product, x: fx.Node, other: fx.Node) -> bool:
    inner = _source(other, aten.tanh)
    if inner is None or found.constant != 1.0 or _source(inner, aten.softplus) is not x:
        return False
    return bool(argument(inner, "beta") == 1 and argument(inner, "threshold") >= 20)


def _gelu(found: Product, x: fx.Node, other: fx.Node) -> bool:
    scaled = _source(_plus(other, 1.0), aten.erf)
    return found.constant == 0.5 and _times(scaled, 1 / math.sqrt(2)) is x


def _gelu_tanh(found: Product, x: fx.Node, other: fx.Node) -> bool:
    scaled = _source(_plus(other, 1.0), aten.tanh)
    terms = operand_nodes(_times(scaled, math.sqrt(2 / math.pi)), aten.add)
    if found.constant != 0.5 or terms is None or x not in terms:
        return False
    constant, cube = _power(terms[1] if terms[0] is x else terms[0])
    return _near(constant, 0.044715) and cube == (x, x, x)


def _power(node: fx.Node) -> tuple[float, tuple[fx.Node, ...]]:
    """A product in which `x ** n` is written as factors."""
    constant, factors = product(node)
    spelled: list[fx.Node] = []
    for factor in factors:
        base, exponent = operands(factor, aten.pow) or (factor, 1)
        spelled += [base] * int(exponent) if number(exponent) in (2.0, 3.0) else [factor]
    return constant, tuple(spelled)


def _hardswish(found: Product, x: fx.Node, other: fx.Node) -> bool:
    clamped = _clamped(other)
    if clamped is None:
        return _source(other, aten.hardsigmoid) is x and found.constant == 1.0
    source, low, high = clamped
    if (low, high) == (0.0, 6.0):
        return _plus(source, 3.0) is x and _near(found.constant, 1 / 6)
    line = affine(source)
    if (low, high) != (0.0, 1.0) or line is None or found.constant != 1.0:
        return False
    if line.source is x:
        return _near(line.scale, 1 / 6) and _near(line.shift, 0.5)
    return line.shift == 0.0 and _near(line.scale, 1 / 6) and _plus(line.source, 3.0) is x


_PRODUCTS: tuple[tuple[Callable[[Product, fx.Node, fx.Node], bool], Operator, dict[str, str]], ...] = (
    (_silu, aten.silu.default, {}),
    (_mish, aten.mish.default, {}),
    (_gelu, aten.gelu.default, {}),
    (_gelu_tanh, aten.gelu.default, {"approximate": "tanh"}),
    (_hardswish, aten.hardswish.default, {}),
)


@each(aten.mul, aten.div)
def canonical_activation(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Recognise SiLU, Mish, GELU (both forms) and hardswish written out, and use the one operator.

    Conditions: the constants agree to 1e-6; softplus has beta 1 and its usual threshold.
    """
    found = product(node)
    if len(found.factors) != 2 or not is_tensor(node) or not is_float(node):
        return None
    for x, other in (found.factors, found.factors[::-1]):
        match = next(((target, extra) for test, target, extra in _PRODUCTS if test(found, x, other)), None)
        if match and shape(x) == shape(node) and dtype(x) == dtype(node):
            return editor.call(node, match[0], x, **match[1])
    return None


@each(aten.div, aten.log)
def canonical_softmax(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Recognise softmax, log-softmax and log-sum-exp written out with the maximum subtracted.

    Conditions: the maximum that is subtracted runs over the same single dimension as the sum, so that neither
    form overflows where the other does not. `exp(x) / sum(exp(x))` without it is left alone.
    """
    if is_call(node, aten.log):
        inner: Any = node.args[0]
        if not is_call(inner, aten.softmax, aten._softmax):
            return None
        result = editor.call(node, aten.log_softmax.int, inner.args[0], argument(inner, "dim"))
        return result if dtype(result) == dtype(node) else None
    exponential, total = operand_nodes(node) or (None, None)
    if exponential is None or not is_call(exponential, aten.exp) or _source(total, aten.sum) is not exponential:
        return None
    found = _stabilised(exponential)
    if found is None or total is None or not argument(total, "keepdim"):
        return None
    same = dims_of(argument(total, "dim"), len(shape(exponential))) == (found[1],)
    return editor.call(node, aten.softmax.int, *found) if same else None


def _stabilised(exponential: fx.Node) -> tuple[fx.Node, int] | None:
    """`(x, dim)` when this is `exp(x - amax(x, dim, keepdim))`."""
    pair = operands(exponential.args[0], aten.sub)
    if pair is None:
        return None
    x, largest = pair
    if isinstance(largest, fx.Node) and largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]
    if not isinstance(x, fx.Node) or not is_call(largest, aten.amax, aten.max) or largest.args[0] is not x:
        return None
    dims = dims_of(argument(largest, "dim"), len(shape(x)))
    return (x, dims[0]) if dims and len(dims) == 1 and argument(largest, "keepdim") else None


def drop_indices(editor: Editor) -> int:
    """`max(x, dim)[0]` and `min(x, dim)[0]` are `amax` and `amin` when nobody reads the indices.

    Conditions: only the values are read. Both forms propagate NaN.
    """
    count = 0
    for node in editor.nodes(aten.max, aten.min):
        if overload(node) != "dim" or not all(user.target is operator.getitem for user in node.users):
            continue
        read = [user for user in node.users if user.users]
        if not read or any(user.args[1] != 0 for user in read):
            continue
        target = aten.amax.default if is_call(node, aten.max) else aten.amin.default
        values = editor.call(node, target, node.args[0], [argument(node, "dim")], bool(argument(node, "keepdim")))
        for user in read:
            editor.replace(user, values)
        count += 1
    return count


@each(aten.div, aten.mul)
def canonical_layer_norm(editor: Editor, node: fx.Node) -> fx.Node | None:
    """Recognise layer normalisation written out: `(x - mean) / sqrt(var + eps)` over the trailing dimensions.

    Conditions: mean and biased variance run over the same trailing dimensions of the same tensor with
    keepdim, and eps is a constant inside the root.
    """
    centred, scale = operand_nodes(node) or (None, None)
    shifted = affine(_source(scale, aten.sqrt if is_call(node, aten.div) else aten.rsqrt))
    found = _centred(centred)
    if centred is None or found is None or shifted is None or shifted.scale != 1.0 or shifted.shift <= 0.0:
        return None
    x, dims = found
    if not _is_variance(shifted.source, x, centred, dims):
        return None
    rank = len(shape(x))
    if dims != tuple(range(rank - len(dims), rank)) or dtype(x) != dtype(node):
        return None
    sizes = [shape(x)[dim] for dim in dims]
    return editor.call(node, aten.layer_norm.default, x, sizes, None, None, shifted.shift)


def _centred(node: fx.Node | None) -> tuple[fx.Node, tuple[int, ...]] | None:
    """`(x, dims)` when this is `x - mean(x, dims, keepdim)`."""
    x, mean = operand_nodes(node, aten.sub) or (None, None)
    if x is None or mean is None or _source(mean, aten.mean) is not x or not argument(mean, "keepdim"):
        return None
    dims = dims_of(argument(mean, "dim"), len(shape(x)))
    return (x, dims) if dims else None


def _is_variance(node: fx.Node, x: fx.Node, centred: fx.Node, dims: tuple[int, ...]) -> bool:
    """True for the biased variance of `x` over `dims`, by `var` or as the mean of squares of the centred values."""
    rank = len(shape(x))
    if node.op != "call_function" or not argument(node, "keepdim"):
        return False
    if is_call(node, aten.var):
        biased = argument(node, "correction") == 0 if overload(node) == "correction" else not argument(node, "unbiased")
        return node.args[0] is x and biased and dims_of(argument(node, "dim"), rank) == dims
    if is_call(node, aten.mean) and isinstance(node.args[0], fx.Node):
        constant, factors = _power(node.args[0])
        same = all(factor is centred or _centred(factor) == (x, dims) for factor in factors)
        return constant == 1.0 and len(factors) == 2 and same and dims_of(argument(node, "dim"), rank) == dims
    return False


NONE, MEAN, SUM = 0, 1, 2
"""Values of the argument `reduction` of PyTorch's losses."""
_TYPES = (torch.float32, torch.float64)
"""Narrower ones are summed in float32 by eager, and would not be here."""


@each(aten.cross_entropy_loss, aten.triplet_margin_loss, aten.pairwise_distance, aten.cosine_similarity)
def write_out_row_losses(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A loss, distance or similarity of rows is written as eager computes it, so that its reductions can be fused.

    Conditions: rows in float32 or float64, of equal shapes. Of cross entropy: a matrix of scores, a class for each row, no
    weights, no smoothing. Of distances: the Euclidean one, and no swap.
    """
    given = arguments(node)
    if is_call(node, aten.cross_entropy_loss):
        return _cross_entropy(editor, node, given)
    rows = [given[name] for name in ("anchor", "positive", "negative", "x1", "x2") if name in given]
    if any(dtype(item) not in _TYPES or shape(item) != shape(rows[0]) for item in rows) or not shape(rows[0]):
        return None
    if is_call(node, aten.cosine_similarity):
        return _cosine_similarity(editor, node, rows[0], rows[1], given)
    if scalar(given["p"]) != 2.0 or given.get("swap"):
        return None
    eps = float(given["eps"])
    if is_call(node, aten.pairwise_distance):
        return _distance(editor, node, rows[0], rows[1], eps, bool(given["keepdim"]))
    near, far = (_distance(editor, node, rows[0], other, eps) for other in rows[1:])
    beyond = editor.call(node, aten.add.Scalar, editor.call(node, aten.sub.Tensor, near, far), float(given["margin"]))
    return _reduced(editor, node, editor.call(node, aten.clamp_min.default, beyond, 0.0), int(given["reduction"]))


def _distance(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node, eps: float, keepdim: bool = False) -> fx.Node:
    apart = editor.call(at, aten.add.Scalar, editor.call(at, aten.sub.Tensor, one, two), eps)
    return editor.call(at, aten.linalg_vector_norm.default, apart, 2, [-1], keepdim)


def _cosine_similarity(editor: Editor, at: fx.Node, one: fx.Node, two: fx.Node, given: dict[str, Any]) -> fx.Node:
    dim = int(given["dim"])
    ratios = []
    for rows in (one, two):
        length = editor.call(at, aten.linalg_vector_norm.default, rows, 2, [dim], True)
        at_least = editor.call(at, aten.clamp_min.default, length, float(given["eps"]))
        ratios.append(editor.call(at, aten.div.Tensor, rows, at_least))
    return editor.call(at, aten.sum.dim_IntList, editor.call(at, aten.mul.Tensor, *ratios), [dim])


def _cross_entropy(editor: Editor, at: fx.Node, given: dict[str, Any]) -> fx.Node | None:
    """The logarithm of the sum of exponentials, less the score of each row's own class."""
    scores, classes = given["self"], given["target"]
    if dtype(scores) not in _TYPES or len(shape(scores)) != 2 or dtype(classes) != torch.int64 or not numel(scores):
        return None
    if given.get("weight") is not None or float(given.get("label_smoothing") or 0.0) != 0.0:
        return None
    ignored = editor.call(at, aten.eq.Scalar, classes, int(given["ignore_index"]))
    named = editor.call(at, aten.masked_fill.Scalar, classes, ignored, 0)
    own = editor.call(at, aten.gather.default, scores, 1, editor.call(at, aten.unsqueeze.default, named, 1))
    largest = editor.call(at, aten.amax.default, scores, [1], True)
    powers = editor.call(at, aten.exp.default, editor.call(at, aten.sub.Tensor, scores, largest))
    total = editor.call(at, aten.log.default, editor.call(at, aten.sum.dim_IntList, powers, [1], True))
    missing = editor.call(at, aten.sub.Tensor, total, editor.call(at, aten.sub.Tensor, own, largest))
    losses = editor.call(at, aten.masked_fill.Scalar, editor.reshape(at, missing, shape(classes)), ignored, 0.0)
    if int(given["reduction"]) != MEAN:
        return _reduced(editor, at, losses, int(given["reduction"]))
    counted = editor.call(at, aten.sum.default, editor.call(at, aten.logical_not.default, ignored))
    return editor.call(at, aten.div.Tensor, _reduced(editor, at, losses, SUM), counted)


def _reduced(editor: Editor, at: fx.Node, losses: fx.Node, reduction: int) -> fx.Node:
    if reduction == NONE:
        return losses
    return editor.call(at, aten.mean.default if reduction == MEAN else aten.sum.default, losses)
