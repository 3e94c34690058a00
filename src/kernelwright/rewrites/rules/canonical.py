"""Composites written out in elementary operators, recognised and replaced by the one operator that means the same."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    is_call,
    is_float,
    is_tensor,
    scalar,
    shape,
    value,
)
from kernelwright.rewrites.rules.affine import affine


class Product(NamedTuple):
    """A product flattened into a constant and its factors."""

    constant: float
    factors: tuple[fx.Node, ...]


def product(node: fx.Node) -> Product:
    """Flatten nested multiplications and divisions by constants."""
    if is_call(node, aten.mul, aten.div) and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
        number = scalar(right) if not is_tensor(right) else None
        if isinstance(left, fx.Node) and number:
            inner = product(left)
            return Product(inner.constant * (number if is_call(node, aten.mul) else 1.0 / number), inner.factors)
        if is_call(node, aten.mul) and isinstance(left, fx.Node) and isinstance(right, fx.Node):
            one, two = product(left), product(right)
            return Product(one.constant * two.constant, one.factors + two.factors)
    return Product(1.0, (node,))


def _near(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-6)


def _plus(node: object, number: float) -> fx.Node | None:
    """`source` when `node` is `source + number`."""
    found = affine(node)
    return found.source if found and found.scale == 1.0 and _near(found.shift, number) else None


def _times(node: object, number: float) -> fx.Node | None:
    """`source` when `node` is `source * number`."""
    found = affine(node)
    return found.source if found and found.shift == 0.0 and _near(found.scale, number) else None


def _sole(node: fx.Node, *packets: object) -> fx.Node | None:
    """The first argument when `node` is a plain call of one of these operators."""
    source = node.args[0] if is_call(node, *packets) else None
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
    return found.constant == 1.0 and _sole(other, aten.sigmoid) is x


def _mish(found: Product, x: fx.Node, other: fx.Node) -> bool:
    inner = _sole(other, aten.tanh)
    if inner is None or found.constant != 1.0 or _sole(inner, aten.softplus) is not x:
        return False
    return bool(argument(inner, "beta") == 1 and argument(inner, "threshold") >= 20)


def _gelu(found: Product, x: fx.Node, other: fx.Node) -> bool:
    error = _plus(other, 1.0)
    scaled = _sole(error, aten.erf) if error is not None else None
    return found.constant == 0.5 and scaled is not None and _times(scaled, 1 / math.sqrt(2)) is x


def _gelu_tanh(found: Product, x: fx.Node, other: fx.Node) -> bool:
    tanh = _plus(other, 1.0)
    scaled = _sole(tanh, aten.tanh) if tanh is not None else None
    inner = _times(scaled, math.sqrt(2 / math.pi)) if scaled is not None else None
    if found.constant != 0.5 or inner is None or not is_call(inner, aten.add) or inner.kwargs or len(inner.args) != 2:
        return False
    for one, two in (inner.args, inner.args[::-1]):
        if one is x and isinstance(two, fx.Node):
            constant, cube = _power(two)
            if _near(constant, 0.044715) and cube == (x, x, x):
                return True
    return False


def _power(node: fx.Node) -> tuple[float, tuple[fx.Node, ...]]:
    """A product with `x ** n` spelled out."""
    constant, factors = product(node)
    spelled: list[fx.Node] = []
    for factor in factors:
        exponent = scalar(factor.args[1]) if is_call(factor, aten.pow) and not is_tensor(factor.args[1]) else None
        if exponent in (2.0, 3.0) and isinstance(factor.args[0], fx.Node):
            spelled += [factor.args[0]] * int(exponent)
        else:
            spelled.append(factor)
    return constant, tuple(spelled)


def _hardswish(found: Product, x: fx.Node, other: fx.Node) -> bool:
    clamped = _clamped(other)
    if clamped is None:
        return _sole(other, aten.hardsigmoid) is x and found.constant == 1.0
    source, low, high = clamped
    if (low, high) == (0.0, 6.0):
        return _plus(source, 3.0) is x and _near(found.constant, 1 / 6)
    line = affine(source)
    if (low, high) != (0.0, 1.0) or line is None or found.constant != 1.0:
        return False
    if line.source is x:
        return _near(line.scale, 1 / 6) and _near(line.shift, 0.5)
    return line.shift == 0.0 and _near(line.scale, 1 / 6) and _plus(line.source, 3.0) is x


_PRODUCTS: tuple[tuple[Callable[[Product, fx.Node, fx.Node], bool], object, dict[str, str]], ...] = (
    (_silu, aten.silu.default, {}),
    (_mish, aten.mish.default, {}),
    (_gelu, aten.gelu.default, {}),
    (_gelu_tanh, aten.gelu.default, {"approximate": "tanh"}),
    (_hardswish, aten.hardswish.default, {}),
)


def canonical_activation(editor: Editor) -> int:
    """Recognise SiLU, Mish, GELU (both forms) and hardswish written out, and use the one operator.

    Conditions: the constants agree to 1e-6; softplus has beta 1 and its usual threshold.
    """
    count = 0
    for node in editor.nodes(aten.mul, aten.div):
        if node._erased or not is_tensor(node) or not is_float(node):
            continue
        found = product(node)
        if len(found.factors) != 2:
            continue
        for x, other in (found.factors, found.factors[::-1]):
            match = next(((target, extra) for test, target, extra in _PRODUCTS if test(found, x, other)), None)
            if match and shape(x) == shape(node) and value(x).dtype == value(node).dtype:
                editor.replace(node, editor.call(node, match[0], x, **match[1]))  # type: ignore[arg-type]
                count += 1
                break
    return count


def canonical_softmax(editor: Editor) -> int:
    """Recognise softmax, log-softmax and log-sum-exp written out with the maximum subtracted.

    Conditions: the maximum that is subtracted runs over the same single dimension as the sum, so that neither
    form overflows where the other does not. `exp(x) / sum(exp(x))` without it is left alone.
    """
    count = 0
    for node in editor.nodes(aten.div):
        if node._erased or len(node.args) != 2 or not is_call(node.args[0], aten.exp):
            continue
        exponential, total = node.args
        if not isinstance(exponential, fx.Node) or not is_call(total, aten.sum) or not isinstance(total, fx.Node):
            continue
        found = _stabilised(exponential)
        if found and total.args[0] is exponential and _keeps(total, found[1]):
            editor.replace(node, editor.call(node, aten.softmax.int, found[0], found[1]))
            count += 1
    for node in editor.nodes(aten.log):
        inner = node.args[0]
        if not node._erased and isinstance(inner, fx.Node) and is_call(inner, aten.softmax, aten._softmax):
            dim = argument(inner, "dim")
            result = editor.call(node, aten.log_softmax.int, inner.args[0], dim)
            if value(result).dtype == value(node).dtype:
                editor.replace(node, result)
                count += 1
    return count


def _stabilised(exponential: fx.Node) -> tuple[fx.Node, int] | None:
    """`(x, dim)` when this is `exp(x - amax(x, dim, keepdim))`."""
    inner = exponential.args[0]
    if not isinstance(inner, fx.Node) or not is_call(inner, aten.sub) or inner.kwargs:
        return None
    x, largest = inner.args
    if not isinstance(x, fx.Node) or not isinstance(largest, fx.Node):
        return None
    if largest.target is operator.getitem and largest.args[1] == 0:
        largest = largest.args[0]
    if not isinstance(largest, fx.Node) or not is_call(largest, aten.amax, aten.max) or largest.args[0] is not x:
        return None
    dims = dims_of(argument(largest, "dim"), len(shape(x)))
    return (x, dims[0]) if dims and len(dims) == 1 and argument(largest, "keepdim") else None


def _keeps(node: fx.Node, dim: int) -> bool:
    source = node.args[0]
    dims = dims_of(argument(node, "dim"), len(shape(source))) if isinstance(source, fx.Node) else None
    return dims == (dim,) and bool(argument(node, "keepdim"))


def drop_indices(editor: Editor) -> int:
    """`max(x, dim)[0]` and `min(x, dim)[0]` are `amax` and `amin` when nobody reads the indices.

    Conditions: only the values are read. Both forms propagate NaN.
    """
    count = 0
    for node in editor.nodes(aten.max, aten.min):
        if str(cast_overload(node)) != "dim" or not all(user.target is operator.getitem for user in node.users):
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


def cast_overload(node: fx.Node) -> str:
    """The overload's name of an ATen call, such as `dim`."""
    return str(getattr(node.target, "_overloadname", ""))


def canonical_layer_norm(editor: Editor) -> int:
    """Recognise layer normalisation written out: `(x - mean) / sqrt(var + eps)` over the trailing dimensions.

    Conditions: mean and biased variance run over the same trailing dimensions of the same tensor with
    keepdim, and eps is a constant inside the root.
    """
    count = 0
    for node in editor.nodes(aten.div, aten.mul):
        if node._erased or len(node.args) != 2 or node.kwargs or not all(is_tensor(item) for item in node.args):
            continue
        centred, scale = node.args
        assert isinstance(centred, fx.Node)
        assert isinstance(scale, fx.Node)
        root = _sole(scale, aten.sqrt) if is_call(node, aten.div) else _sole(scale, aten.rsqrt)
        shifted = affine(root) if root is not None else None
        found = _centred(centred)
        if found is None or shifted is None or shifted.scale != 1.0 or shifted.shift <= 0.0:
            continue
        x, dims = found
        if not _is_variance(shifted.source, x, centred, dims):
            continue
        rank = len(shape(x))
        if dims != tuple(range(rank - len(dims), rank)) or value(x).dtype != value(node).dtype:
            continue
        sizes = [shape(x)[dim] for dim in dims]
        editor.replace(node, editor.call(node, aten.layer_norm.default, x, sizes, None, None, shifted.shift))
        count += 1
    return count


def _centred(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    """`(x, dims)` when this is `x - mean(x, dims, keepdim)`."""
    if not is_call(node, aten.sub) or node.kwargs or not all(is_tensor(item) for item in node.args):
        return None
    x, mean = node.args
    if not isinstance(x, fx.Node) or not isinstance(mean, fx.Node):
        return None
    if not is_call(mean, aten.mean) or mean.args[0] is not x or not argument(mean, "keepdim"):
        return None
    dims = dims_of(argument(mean, "dim"), len(shape(x)))
    return (x, dims) if dims else None


def _is_variance(node: fx.Node, x: fx.Node, centred: fx.Node, dims: tuple[int, ...]) -> bool:
    """Whether this is the biased variance of `x` over `dims`, by `var` or as the mean of squares of the centred values."""
    rank = len(shape(x))
    if not argument(node, "keepdim") if node.op == "call_function" else True:
        return False
    if is_call(node, aten.var):
        biased = argument(node, "correction") == 0 if cast_overload(node) == "correction" else not argument(node, "unbiased")
        return node.args[0] is x and biased and dims_of(argument(node, "dim"), rank) == dims
    if is_call(node, aten.mean) and isinstance(node.args[0], fx.Node):
        constant, factors = _power(node.args[0])
        same = all(factor is centred or _centred(factor) == (x, dims) for factor in factors)
        return constant == 1.0 and len(factors) == 2 and same and dims_of(argument(node, "dim"), rank) == dims
    return False
