"""Lowers operators into steps of a program: pointwise ones, norms, reductions and scans of rows, and reads of windows.

Each point of a pool or a convolution reads a window of another tensor. In pools and depthwise convolutions each tap is a
load whose position moves with the point; outside the tensor it reads a constant. Other convolutions are one step, which
tiles on tensor cores compute.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import fx

from kernelwright.rewrites.fusion.products import PRODUCTS
from kernelwright.rewrites.fusion.program import (
    DTYPE,
    FULL,
    REAL,
    ROUNDED,
    LoopProgram,
    Operand,
    Pooled,
    UnsupportedError,
    Window,
)
from kernelwright.rewrites.graph import (
    argument,
    arguments,
    aten,
    dims_of,
    is_call,
    is_mutable,
    is_tensor,
    numbers,
    numel,
    overload,
    packet_of,
    read_once,
    scalar,
    shape,
    stretch_of,
    value,
)
from kernelwright.rewrites.rules.affine import ADAPTIVE_POOLS, AVERAGE_POOLS, CONVOLUTIONS, TRANSPOSED
from kernelwright.rewrites.rules.canonical import MEAN, SUM
from kernelwright.rewrites.rules.convolution import geometry
from kernelwright.rewrites.rules.reductions import MAX_POOLS
from kernelwright.rewrites.templates.convolution import TF32, ConvolutionSizes

CONVERSIONS = (aten.to, aten._to_copy)
COMPARISONS: dict[Any, str] = {aten.gt: "gt", aten.lt: "lt", aten.ge: "ge", aten.le: "le", aten.eq: "eq", aten.ne: "ne"}
UNARY = {
    getattr(aten, name): name
    for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "erf", "log1p", "expm1", "sin", "cos")
}
BINARY = {getattr(aten, name): name for name in ("add", "sub", "mul", "div", "maximum", "minimum")}
BINARY |= {aten.max: "maximum", aten.min: "minimum"}
SMOOTH = (aten.sigmoid, aten.silu, aten.softplus, aten.mish, aten.gelu, aten.log_sigmoid, aten.elu, aten.selu)
PIECEWISE = (
    *(aten.relu, aten.relu6, aten.leaky_relu, aten.hardtanh, aten.hardsigmoid, aten.hardswish),
    *(aten.clamp, aten.clamp_min, aten.clamp_max),
)
POWERS = frozenset({-2.0, -1.0, -0.5, 0.5, 2.0, 3.0, 4.0})
MOST_PARTS = 4
"""Parts of a tensor that change places: each point reads all of them, all but one masked off. Our choice."""
MOST_TAPS = 128
"""Elements of a window: each is a load of its own in the kernel's text."""
MOST_PLACES = 64
"""Places of a window for each of which a convolution's kernel computes a tile. Our choice."""

Lowering = Callable[[LoopProgram, fx.Node, str], int]
"""Appends the steps of a call, whose operands are of this level, and returns the last one."""


def _unary(program: LoopProgram, node: fx.Node, level: str) -> int:
    return program.add(UNARY[packet_of(node)], program.operand(node.args[0], level))


def _clip(program: LoopProgram, x: Operand, low: float | None, high: float | None) -> int:
    result = x
    if low is not None and low != -math.inf:
        result = program.add("maximum", result, low)
    if high is not None and high != math.inf:
        result = program.add("minimum", result, high)
    if result is x:
        raise UnsupportedError("a clamp without bounds")
    return int(result)


def _binary(program: LoopProgram, node: fx.Node, level: str) -> int:
    if node.kwargs.get("rounding_mode") is not None:
        raise UnsupportedError("division with rounding")
    if len(node.args) != 2 or (overload(node) not in ("Tensor", "Scalar", "other", "default")):
        raise UnsupportedError("a form with other arguments")
    left, right = (program.operand(item, level) for item in node.args)
    alpha = scalar(node.kwargs.get("alpha", 1))
    if alpha is None:
        raise UnsupportedError("alpha is no number")
    if alpha != 1.0:
        right = program.add("mul", right, alpha)
    if is_call(node, aten.rsub):
        return program.add("sub", right, left)
    return program.add(BINARY[packet_of(node)], left, right)


def _power(program: LoopProgram, node: fx.Node, level: str) -> int:
    exponent = scalar(node.args[1]) if not is_tensor(node.args[1]) else None
    if exponent not in POWERS:
        raise UnsupportedError(f"power {exponent}")
    x = program.operand(node.args[0], level)
    if abs(exponent) == 0.5:
        return program.add("sqrt" if exponent > 0 else "rsqrt", x)
    result = x
    for _ in range(int(abs(exponent)) - 1):
        result = program.add("mul", result, x)
    return program.add("div", 1.0, result) if exponent < 0 else int(result)


def _softplus(program: LoopProgram, x: Operand, beta: float = 1.0, threshold: float = 20.0) -> int:
    scaled = x if beta == 1.0 else program.add("mul", x, beta)
    soft = program.add("log1p", program.add("exp", scaled))
    if beta != 1.0:
        soft = program.add("div", soft, beta)
    return program.add("where", program.add("gt", scaled, threshold), x, soft)


def _gelu(program: LoopProgram, x: Operand, approximate: str) -> int:
    add = program.add
    if approximate == "tanh":
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
        cube = add("mul", add("mul", add("mul", x, x), x), 0.044715)
        inner = add("exp", add("mul", add("add", x, cube), -2 * math.sqrt(2 / math.pi)))
        return add("div", x, add("add", inner, 1.0))
    inner = add("erf", add("mul", x, math.sqrt(0.5)))
    return add("mul", add("mul", x, 0.5), add("add", inner, 1.0))


def _smooth_activation(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Activations made of exponentials, with their constants."""
    x, given, add = program.operand(node.args[0], level), arguments(node), program.add
    if is_call(node, aten.sigmoid, aten.silu):
        return add("div", x if is_call(node, aten.silu) else 1.0, add("add", add("exp", add("neg", x)), 1.0))
    if is_call(node, aten.softplus):
        return _softplus(program, x, float(given["beta"]), float(given["threshold"]))
    if is_call(node, aten.mish):
        # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2): one exponential, and no cancellation.
        exponential = add("exp", add("minimum", x, 20.0))
        ratio = add("mul", exponential, add("add", exponential, 2.0))
        return add("mul", x, add("div", ratio, add("add", ratio, 2.0)))
    if is_call(node, aten.gelu):
        return _gelu(program, x, given["approximate"])
    if is_call(node, aten.log_sigmoid):
        small = add("log1p", add("exp", add("neg", add("abs", x))))
        return add("sub", add("minimum", x, 0.0), small)
    if is_call(node, aten.selu):
        alpha, scale, steep = 1.6732632423543772, 1.0507009873554805, 1.0
    else:
        alpha, scale, steep = (float(given[name]) for name in ("alpha", "scale", "input_scale"))
    negative = add("mul", add("expm1", x if steep == 1.0 else add("mul", x, steep)), alpha * scale)
    return add("where", add("gt", x, 0.0), x if scale == 1.0 else add("mul", x, scale), negative)


def _piecewise_activation(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Activations made of straight lines, with their constants."""
    x, given, add = program.operand(node.args[0], level), arguments(node), program.add
    if is_call(node, aten.relu):
        return add("maximum", x, 0.0)
    if is_call(node, aten.relu6):
        return _clip(program, x, 0.0, 6.0)
    if is_call(node, aten.leaky_relu):
        return add("where", add("gt", x, 0.0), x, add("mul", x, float(given["negative_slope"])))
    if is_call(node, aten.hardtanh):
        return _clip(program, x, float(given["min_val"]), float(given["max_val"]))
    if is_call(node, aten.hardsigmoid):
        return add("div", _clip(program, add("add", x, 3.0), 0.0, 6.0), 6.0)
    if is_call(node, aten.hardswish):
        return add("div", add("mul", x, _clip(program, add("add", x, 3.0), 0.0, 6.0)), 6.0)
    low, high = (scalar(given[name]) if name in given else None for name in ("min", "max"))
    if len(node.all_input_nodes) != 1:
        raise UnsupportedError("a clamp with tensor bounds")
    return _clip(program, x, low, high)


def _converted(program: LoopProgram, node: fx.Node, level: str) -> int:
    """A conversion rounds; a result of 16 bits that the program goes on with is not rounded otherwise."""
    source, dtype = cast(fx.Node, node.args[0]), value(node).dtype
    if value(source).device != value(node).device:
        raise UnsupportedError("a copy to another device")
    x = int(program.operand(source, level))
    return program.add(ROUNDED[dtype], x) if dtype in ROUNDED else x


def _where(program: LoopProgram, node: fx.Node, level: str) -> int:
    if is_call(node, aten.masked_fill):
        condition, chosen, other = node.args[1], node.args[2], node.args[0]
    else:
        condition, chosen, other = node.args
    if not isinstance(condition, fx.Node):
        raise UnsupportedError("a mask that is a number")
    if is_call(condition, *COMPARISONS):
        left, right = (program.operand(item, level) for item in condition.args[:2])
        test = program.add(COMPARISONS[packet_of(condition)], left, right)
    else:
        test = program.add("ne", program.operand(condition, level), 0.0)
    return program.add("where", test, program.operand(chosen, level), program.operand(other, level))


def _simple(program: LoopProgram, node: fx.Node, level: str) -> int:
    """A square or a reciprocal."""
    x = program.operand(node.args[0], level)
    return program.add("mul", x, x) if is_call(node, aten.square) else program.add("div", 1.0, x)


POINTWISE: dict[Any, Lowering] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys((*BINARY, aten.rsub), _binary),
    **dict.fromkeys(SMOOTH, _smooth_activation),
    **dict.fromkeys(PIECEWISE, _piecewise_activation),
    **dict.fromkeys(CONVERSIONS, _converted),
    **dict.fromkeys((aten.where, aten.masked_fill), _where),
    **dict.fromkeys((aten.square, aten.reciprocal), _simple),
    aten.pow: _power,
}
"""Lowering of each pointwise operator into steps."""


def batch_norm(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Batch norm in either mode."""
    given = arguments(node)
    if given["training"]:
        return _affine(program, _normalised_channels(program, node, program.operand(given["input"], level)), given, node)
    if program.split != 1:
        raise UnsupportedError("batch norm over split channels")
    mean, variance = (_channel(program, given[name], node) for name in ("running_mean", "running_var"))
    root = program.add("rsqrt", program.add("add", variance, float(given["eps"])))
    result = program.add("mul", program.add("sub", program.operand(given["input"], level), mean), root)
    return _affine(program, result, given, node)


def _normalised_channels(program: LoopProgram, node: fx.Node, x: Operand) -> int:
    """Batch norm in train mode, and the running statistics after it."""
    given, count, add = arguments(node), float(program.count()), program.add
    result = _normalised(program, x, float(given["eps"]))
    running, momentum = [given["running_mean"], given["running_var"]], float(given["momentum"])
    if not all(map(is_tensor, running)):
        return result
    if count < 2 or any(not _only_updated_after(statistic, node) for statistic in running):
        raise UnsupportedError("running statistics that are read elsewhere")
    mean = add("div", add("sum", x), count)
    centred = add("sub", x, mean)
    unbiased = add("div", add("sum", add("mul", centred, centred)), count - 1)
    for statistic, new in zip(running, (mean, unbiased), strict=True):
        kept = add("mul", _channel(program, statistic, node), 1 - momentum)
        program.updates[statistic] = add("add", kept, add("mul", new, momentum))
    return result


def _only_updated_after(statistic: fx.Node, node: fx.Node) -> bool:
    """True where a buffer is used by a norm and, later, by calls that write to it alone."""
    users = [user for user in statistic.users if user is not node]
    return statistic.op == "placeholder" and all(
        is_mutable(user) and user.args[0] is statistic and not user.users and node < user for user in users
    )


def _channel(program: LoopProgram, vector: fx.Node, norm: fx.Node) -> int:
    """A vector over dimension 1 of a norm, which is another one of the program where dimensions before it were reduced."""
    if not is_tensor(vector) or value(vector).dtype not in REAL or value(vector).stride() != (1,):
        raise UnsupportedError("a parameter is not a dense vector of real numbers")
    rank = len(program.logical)
    kept = [dim for dim in range(rank) if len(shape(norm)) == rank or dim not in program.reduced]
    strides = [0] * rank
    strides[kept[1]] = int(shape(norm)[1] > 1)
    return program.load(vector, strides)


def _affine(program: LoopProgram, result: int, given: dict[str, Any], norm: fx.Node) -> int:
    if is_tensor(given.get("weight")):
        result = program.add("mul", result, _channel(program, given["weight"], norm))
    if is_tensor(given.get("bias")):
        result = program.add("add", result, _channel(program, given["bias"], norm))
    return result


def _normalised(program: LoopProgram, x: Operand, eps: float) -> int:
    count = float(program.count())
    mean = program.add("div", program.add("sum", x), count)
    centred = program.add("sub", x, mean)
    variance = program.add("div", program.add("sum", program.add("mul", centred, centred)), count)
    return program.add("mul", centred, program.add("rsqrt", program.add("add", variance, eps)))


def _norm(program: LoopProgram, node: fx.Node, level: str) -> int:
    given = arguments(node)
    x = program.operand(given["input"], level)
    if is_call(node, aten.rms_norm):
        squares = program.add("div", program.add("sum", program.add("mul", x, x)), float(program.count()))
        if given["eps"] is None and value(given["input"]).dtype != DTYPE:
            raise UnsupportedError("an epsilon by default of a type of 16 bits, which differs between versions")
        eps = 1.1920928955078125e-07 if given["eps"] is None else float(given["eps"])
        result = program.add("mul", x, program.add("rsqrt", program.add("add", squares, eps)))
    else:
        result = _normalised(program, x, float(given["eps"]))
    if is_call(node, aten.group_norm, aten.instance_norm):
        return _affine(program, result, given, node)
    if is_tensor(given["weight"]):
        result = program.add("mul", result, program.operand(given["weight"], FULL))
    if is_tensor(given.get("bias")):
        result = program.add("add", result, program.operand(given["bias"], FULL))
    return result


def _reduction(program: LoopProgram, node: fx.Node, level: str) -> int:
    x, add = program.operand(node.args[0], level), program.add
    if is_call(node, aten.sum):
        return add("sum", x)
    if is_call(node, aten.mean, *ADAPTIVE_POOLS):
        return add("div", add("sum", x), float(program.count()))
    if is_call(node, aten.amax, aten.amin):
        return add("max" if is_call(node, aten.amax) else "min", x)
    if is_call(node, aten.argmax, aten.argmin):
        # Both take the first NaN before anything else, which stays NaN when it is negated.
        return add("argmax", x if is_call(node, aten.argmax) else add("neg", x))
    if is_call(node, aten.linalg_vector_norm):
        return _vector_norm(program, node, x)
    if is_call(node, aten.var, aten.std):
        variance = _variance(program, node, x)
        return add("sqrt", variance) if is_call(node, aten.std) else variance
    largest = add("max", x)
    if is_call(node, aten.logsumexp):
        # An infinite maximum would make infinity minus infinity.
        largest = add("where", add("eq", add("abs", largest), math.inf), 0.0, largest)
    shifted = add("sub", x, largest)
    exponential = add("exp", shifted)
    total = add("sum", exponential)
    if is_call(node, aten.logsumexp):
        return add("add", add("log", total), largest)
    if is_call(node, aten.log_softmax):
        return add("sub", shifted, add("log", total))
    return add("div", exponential, total)


def _vector_norm(program: LoopProgram, node: fx.Node, x: Operand) -> int:
    order, add = scalar(arguments(node)["ord"]), program.add
    if order == 2:
        return add("sqrt", add("sum", add("mul", x, x)))
    if order == 1:
        return add("sum", add("abs", x))
    raise UnsupportedError(f"a norm of order {order}")


def _variance(program: LoopProgram, node: fx.Node, x: Operand) -> int:
    given, count, add = arguments(node), float(program.count()), program.add
    correction = scalar(given.get("correction", float(given.get("unbiased", True))))
    freedom = count - (1.0 if correction is None else correction)
    if freedom <= 0:
        raise UnsupportedError("a variance without degrees of freedom")
    centred = add("sub", x, add("div", add("sum", x), count))
    return add("div", add("sum", add("mul", centred, centred)), freedom)


def _loss(program: LoopProgram, node: fx.Node, level: str) -> int:
    """The mean or sum over all elements of a loss of each."""
    given, add = arguments(node), program.add
    if int(given["reduction"]) not in (MEAN, SUM):
        raise UnsupportedError("a loss that is not reduced")
    x, wanted = program.operand(node.args[0], level), program.operand(node.args[1], level)
    apart = add("sub", x, wanted)
    if is_call(node, aten.mse_loss):
        each = add("mul", apart, apart)
    elif is_call(node, aten.l1_loss):
        each = add("abs", apart)
    elif is_call(node, aten.kl_div):
        if given["log_target"]:
            each = add("mul", add("exp", wanted), add("sub", wanted, x))
        else:
            entropy = add("where", add("eq", wanted, 0.0), 0.0, add("mul", wanted, add("log", wanted)))
            each = add("sub", entropy, add("mul", wanted, x))
    else:
        # Below `beta` half the square over `beta`, above it the distance less `beta / 2`; of Huber's times `beta`.
        is_huber = is_call(node, aten.huber_loss)
        beta = float(given["delta" if is_huber else "beta"])
        if beta <= 0:
            raise UnsupportedError("a distance without a square near zero")
        distance = add("abs", apart)
        near = add("minimum", distance, beta)
        each = add("mul", near, add("sub", distance, add("mul", near, 0.5)))
        each = each if is_huber or beta == 1.0 else add("div", each, beta)
    total = add("sum", each)
    return add("div", total, float(program.count())) if int(given["reduction"]) == MEAN else total


LOSSES = (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div)

ROW_OPERATORS: dict[Any, Lowering] = {
    **dict.fromkeys(
        (
            *(aten.sum, aten.mean, aten.amax, aten.amin, aten.softmax, aten.log_softmax, aten.logsumexp),
            *(aten.linalg_vector_norm, aten.var, aten.std, aten.argmax, aten.argmin),
        ),
        _reduction,
    ),
    **dict.fromkeys(ADAPTIVE_POOLS, _reduction),
    **dict.fromkeys((aten.layer_norm, aten.group_norm, aten.instance_norm, aten.rms_norm), _norm),
    **dict.fromkeys(LOSSES, _loss),
}
"""Lowering of each operator that reduces rows into steps."""


def _scan(program: LoopProgram, node: fx.Node, level: str) -> int:
    """A cumulative sum or product, also from the end or of what comes before each element."""
    last = len(program.logical) - 1
    if is_call(node, aten.flip):
        scan = read_once(node.args[0], aten.cumsum)
        first = read_once(scan.args[0], aten.flip) if scan is not None else None
        if scan is None or first is None or not node.args[1] == first.args[1] == [scan.args[1]]:
            raise UnsupportedError("a flip that belongs to no scan")
    else:
        scan, first = node, None
    if is_call(node, aten.cat):
        scan = read_once(padded[1], aten.cumsum) if (padded := _after_zeros(node)) and padded[1] is not None else None
    if scan is None or scan.kwargs.get("dtype") is not None or int(argument(scan, "dim")) % (last + 1) != last:
        raise UnsupportedError("no scan along the last dimension")
    if any(is_call(user, aten.flip) or _after_zeros(user) for user in scan.users) and scan is node:
        raise UnsupportedError("a scan that is part of another one")
    name = "cumprod" if is_call(scan, aten.cumprod) else "cumsum" if first is None else "cumsum_reversed"
    if any(program.steps[index].name != name for index in program.scans):
        raise UnsupportedError("another scan")
    source: Any = (first or scan).args[0]
    if source in program.values:
        return program.add(name, program.operand(source, level))
    zeros = 0
    if scan is not node and first is None:
        zeros = program.logical[-1] - shape(source)[-1]
    elif is_call(source, aten.slice) and (padded := _after_zeros(source.args[0])) and source.args[1] != last:
        if argument(source, "start") in (None, 0) and argument(source, "step") == 1:
            zeros, source = padded
    elif padded := _after_zeros(source):
        zeros, source = padded
    if not zeros:
        return program.add(name, program.operand(source, level))
    if value(source).dtype != DTYPE or len(shape(source)) != last + 1 or name == "cumprod":
        raise UnsupportedError("zeros before something else")
    strides = value(source).stride()
    window = Window((0,) * last + (-zeros,), (1,) * (last + 1), shape(source), 0.0)
    return program.add(name, program.load(source, strides, -zeros * strides[-1], window))


def _after_zeros(node: Any) -> tuple[int, fx.Node] | None:
    """How many zeros stand before a tensor along the last dimension of a concatenation, and the tensor."""
    if not is_call(node, aten.cat) or len(node.args[0]) != 2:
        return None
    zeros, rest = node.args[0]
    dim = int(argument(node, "dim")) % len(shape(node))
    is_zero = is_call(zeros, aten.zeros_like, aten.zeros, aten.new_zeros)
    return (shape(zeros)[dim], rest) if is_zero and dim == len(shape(node)) - 1 else None


SCAN_OPERATORS: dict[Any, Lowering] = dict.fromkeys((aten.cumsum, aten.cumprod, aten.flip, aten.cat), _scan)
"""Lowering of each operator that is, or ends, a scan."""


def reduction_of(node: fx.Node) -> tuple[int, tuple[int, ...]] | None:
    """`(split, reduced dimensions of the iteration space)` of a row operator; None when it has no such form."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    rank, given = len(shape(source)), arguments(node)
    if is_call(node, aten.layer_norm, aten.rms_norm):
        return 1, tuple(range(rank - len(given["normalized_shape"]), rank))
    if is_call(node, aten.batch_norm):
        return 1, (0, *range(2, rank))
    if is_call(node, aten.group_norm):
        return int(given["num_groups"]), tuple(range(2, rank + 1))
    if is_call(node, aten.instance_norm):
        return (1, tuple(range(2, rank))) if given["running_mean"] is None and given["use_input_stats"] else None
    if is_call(node, *LOSSES):
        return (1, tuple(range(rank))) if rank else None
    if is_call(node, *ADAPTIVE_POOLS):
        pooled = shape(node)[2:]
        return (1, tuple(range(2, rank))) if rank == len(shape(node)) and all(size == 1 for size in pooled) else None
    dims = dims_of(argument(node, "dim"), rank)
    if not dims or dims != tuple(range(dims[0], dims[-1] + 1)) or given.get("dtype") not in (None, DTYPE):
        return None
    return 1, dims


def _taps(
    program: LoopProgram,
    source: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    outside: float = 0.0,
) -> Iterator[int]:
    """A load for each tap of windows over the last dimensions of a tensor, the last dimension's taps side by side.

    Raises:
        UnsupportedError: the tensor is made in this program or is not of real numbers, or the window has too many taps.
    """
    if not is_tensor(source) or value(source).dtype not in REAL or source in program.values or program.reduced:
        raise UnsupportedError("a window over something that this program computes")
    if len(shape(source)) != len(program.logical) or math.prod(kernel) > MOST_TAPS:
        raise UnsupportedError("a window with too many taps or another rank")
    lead = (0,) * (len(program.logical) - len(kernel))
    steps, strides = (*(1 for _ in lead), *stride), value(source).stride()
    for tap in itertools.product(*map(range, kernel)):
        shifts = (*lead, *(at * apart - before for at, apart, before in zip(tap, dilation, padding, strict=True)))
        offset = sum(shift * item for shift, item in zip(shifts, strides, strict=True))
        moved = [step * item for step, item in zip(steps, strides, strict=True)]
        yield program.load(source, moved, offset, Window(shifts, steps, shape(source), outside))


def pooled_of(node: fx.Node, program: LoopProgram) -> Pooled | None:
    """Windows of a pool over what a convolution's program has computed; None where its tiles cannot pool them."""
    conv = program.convolution
    if conv is None or program.pooled or not is_call(node, *MAX_POOLS, *AVERAGE_POOLS):
        return None
    given, rank = arguments(node), len(conv.kernel)
    window = numbers(given["kernel_size"], rank)
    apart = numbers(given["stride"], rank) or window
    plain = not any(numbers(given["padding"], rank)) and all(step == 1 for step in numbers(given.get("dilation", 1), rank))
    sizes = zip(program.logical[2:], window, strict=True)
    whole = not given["ceil_mode"] or all(size % width == 0 for size, width in sizes)
    # A tile has outputs at one residue of a transposed conv's stride.
    steps = conv.stride if conv.transposed else (1,) * rank
    aligned = all(width % step == 0 for width, step in zip(window, steps, strict=True))
    if window != apart or not (plain and whole and aligned) or math.prod(window) > MOST_PLACES:
        return None
    return Pooled(program.logical, window)


def _pool(program: LoopProgram, node: fx.Node, level: str) -> int:
    given = arguments(node)
    is_maximum = is_call(node, *MAX_POOLS)
    if program.pooled and node.args[0] in program.values:
        whole = program.add("window_max" if is_maximum else "window_sum", program.operand(node.args[0], level))
        count = given.get("divisor_override") or math.prod(program.pooled.window)
        return whole if is_maximum else program.add("div", whole, float(count))
    rank = 1 + (MAX_POOLS if is_maximum else AVERAGE_POOLS).index(node.target.overloadpacket)  # type: ignore[union-attr]
    kernel = numbers(given["kernel_size"], rank)
    stride = numbers(given["stride"], rank) or kernel
    padding = numbers(given["padding"], rank)
    dilation = numbers(given["dilation"], rank) if is_maximum else (1,) * rank
    taps = _taps(program, node.args[0], kernel, stride, padding, dilation, -math.inf if is_maximum else 0.0)
    # Taps side by side first: windows of neighbouring rows share what comes of them.
    reduce = functools.partial(functools.reduce, functools.partial(program.add, "maximum" if is_maximum else "add"))
    result: int = reduce([reduce(line) for line in zip(*[taps] * kernel[-1], strict=True)])
    if is_maximum:
        return result
    if given["ceil_mode"] or (any(padding) and not given["count_include_pad"]):
        raise UnsupportedError("windows of several sizes")
    return program.add("div", result, float(given.get("divisor_override") or math.prod(kernel)))


def _depthwise(program: LoopProgram, node: fx.Node, level: str) -> int:
    conv = geometry(node)
    if conv is None or conv.transposed or conv.groups == 1 or shape(conv.weight)[:2] != (conv.groups, 1):
        raise UnsupportedError("not a depthwise conv with one output for each channel")
    if value(conv.weight).dtype not in REAL:
        raise UnsupportedError("the weight is not of real numbers")
    strides = value(conv.weight).stride()

    ones = [int(dim == 1) for dim in range(len(program.logical))]
    result: int | None = None
    taps = _taps(program, conv.source, conv.kernel, conv.stride, conv.padding, conv.dilation)
    for place, tap in zip(itertools.product(*map(range, conv.kernel)), taps, strict=True):
        offset = sum(at * stride for at, stride in zip(place, strides[2:], strict=True))
        product = program.add("mul", tap, program.load(conv.weight, [strides[0] * own for own in ones], offset))
        result = product if result is None else program.add("add", result, product)
    if result is None:
        raise UnsupportedError("a window without taps")
    if conv.bias is not None:
        result = program.add("add", result, program.load(conv.bias, ones))
    return result


def rearranged(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Parts of one tensor side by side in another order, some of them negated, as rotary embeddings have halves.

    Each part is a load that reads 0 outside it, so that their sum is the whole.
    """
    rank, parts = len(program.logical), cast(Sequence[fx.Node], argument(node, "tensors"))
    dim, start, steps = int(argument(node, "dim")) % rank, 0, []
    sources = set()
    for part in parts:
        negated = read_once(part, aten.neg)
        piece = cast(fx.Node, negated.args[0]) if negated else part
        if (stretch := stretch_of(piece, dim)) is None or value(piece).dtype not in REAL:
            raise UnsupportedError("a part that is no slice of real numbers")
        source, first = stretch
        sources.add(source)
        strides, shifts = value(source).stride(), tuple(-start if axis == dim else 0 for axis in range(rank))
        window = Window(shifts, (1,) * rank, shape(piece), 0.0)
        read = program.load(source, strides, (first - start) * strides[dim], window)
        steps.append(program.add("neg", read) if negated else read)
        start += shape(piece)[dim]
    if len(parts) > MOST_PARTS or len(sources) > 1 or not sources.isdisjoint(program.values):
        raise UnsupportedError("too many parts, or not of one tensor from outside")
    return functools.reduce(functools.partial(program.add, "add"), steps)


def _convolution(program: LoopProgram, node: fx.Node, level: str) -> int:
    """Lowering of any convolution: a depthwise one by its taps, another one as a step that tiles compute."""
    try:
        if not program.pooled:
            return _depthwise(program, node, level)
    except UnsupportedError:
        pass
    conv = geometry(node)
    if conv is None or conv.source in program.values or program.convolution:
        raise UnsupportedError("no conv that tiles compute")
    if value(conv.source).dtype not in REAL or value(conv.weight).dtype != value(conv.source).dtype:
        raise UnsupportedError("operands that are not of one type of real numbers")
    if TF32.refusal(ConvolutionSizes(conv, shape(node))) is not None:
        raise UnsupportedError("no conv that tiles compute")
    if program.reduced not in ((), (1,)) or program.split > 1:
        raise UnsupportedError("a reduction over more than the channels")
    program.convolution = conv
    none = (0,) * len(program.logical)
    result = program.add("convolution", program.load(conv.source, none), program.load(conv.weight, none))
    if is_tensor(conv.bias):
        bias = cast(fx.Node, conv.bias)
        result = program.add("add", result, program.load(bias, (0, value(bias).stride()[0], *none[2:])))
    return result


WINDOWS: dict[Any, Lowering] = {
    **dict.fromkeys((*MAX_POOLS, *AVERAGE_POOLS), _pool),
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED), _convolution),
}
"""Lowering of each operator that reads windows."""


def _joined(program: LoopProgram, node: fx.Node, level: str) -> int:
    """`cat` ends a scan or rearranges a tensor."""
    try:
        return _scan(program, node, level)
    except UnsupportedError:
        return rearranged(program, node, level)


ALONG_THE_OUTPUT: dict[Any, Lowering] = {**WINDOWS, **SCAN_OPERATORS, aten.cat: _joined}
"""Lowering of operators whose kernel has a point for each element of their result."""
LOWERINGS = {**POINTWISE, aten.batch_norm: batch_norm}
"""Lowering of operators whose result has their input's shape."""


def lower(program: LoopProgram, node: fx.Node) -> None:
    """Append a node's steps to a program.

    Raises:
        UnsupportedError: it has none in this program.
    """
    packet = packet_of(node)
    if not is_tensor(node) or (value(node).dtype not in REAL and not is_call(node, aten.argmax, aten.argmin)):
        raise UnsupportedError("not one tensor of real numbers")
    if node.op != "call_function" or (node.kwargs.get("dtype") not in (None, DTYPE) and packet not in CONVERSIONS):
        raise UnsupportedError("not a plain call")
    if packet in ROW_OPERATORS or (is_call(node, aten.batch_norm) and arguments(node)["training"]):
        reduction = reduction_of(node)
        source = node.args[0]
        if reduction is None or not isinstance(source, fx.Node) or shape(source) not in program.shapes:
            raise UnsupportedError("not a reduction over this space")
        split, reduced = reduction
        plain = (aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin)
        if numel(source) == numel(node) and is_call(node, *plain):
            raise UnsupportedError("nothing is reduced")
        if program.reduced and (program.reduced, program.split) != (reduced, split):
            raise UnsupportedError("another reduction")
        program.reduced, program.split = reduced, split
        level, lowering = FULL, ROW_OPERATORS.get(packet) or LOWERINGS[packet]
    elif packet in ALONG_THE_OUTPUT and shape(node) == (
        program.pooled.before if program.pooled and is_call(node, *CONVOLUTIONS, *TRANSPOSED) else program.logical
    ):
        level, lowering = FULL, ALONG_THE_OUTPUT[packet]
    elif packet in PRODUCTS and shape(node) == program.logical:
        level, lowering = FULL, PRODUCTS[packet]
    elif packet in LOWERINGS:
        found_level = program.level_of_shape(shape(node))
        if found_level is None:
            raise UnsupportedError("another shape")
        level, lowering = found_level, LOWERINGS[packet]
    else:
        raise UnsupportedError("no such operator")
    program.values[node] = lowering(program, node, level)
