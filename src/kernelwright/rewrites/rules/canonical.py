"""Recognises composites written out in elementary operators, and replaces each by the one operator that means the same."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    Operator,
    argument,
    aten,
    dims_of,
    dtype,
    is_call,
    is_float,
    is_tensor,
    number,
    operand_nodes,
    operands,
    overload,
    scalar,
    shape,
)
from kernelwright.rewrites.rules.affine import affine
from kernelwright.rewrites.rules.base import each


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
    """A product with `x ** n` spelled out."""
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
    return editor.call(node, aten.softmax.int, *found) if found and total and _keeps(total, found[1]) else None


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


def _keeps(node: fx.Node, dim: int) -> bool:
    return dims_of(argument(node, "dim"), len(shape(argument(node, "self")))) == (dim,) and bool(argument(node, "keepdim"))


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
    """Whether this is the biased variance of `x` over `dims`, by `var` or as the mean of squares of the centred values."""
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
