"""Lowers norms, reductions and scans of rows into steps of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from kernelwright.rewrites.fusion.program import (
    DTYPE,
    FULL,
    REAL,
    LoopProgram,
    Lowering,
    Operand,
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
    read_once,
    scalar,
    shape,
    value,
)

MEAN, SUM = 1, 2
"""Values of the argument `reduction` of PyTorch's losses."""
ADAPTIVE_POOLS = (aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)


def batch_norm(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    """Batch norm in either mode."""
    given = arguments(node)
    if given["training"]:
        return _affine(program, _normalised_channels(program, node, get(given["input"])), given, node)
    if program.split != 1:
        raise UnsupportedError("batch norm over split channels")
    mean, variance = (_channel(program, given[name], node) for name in ("running_mean", "running_var"))
    root = program.add("rsqrt", program.add("add", variance, float(given["eps"])))
    result = program.add("mul", program.add("sub", get(given["input"]), mean), root)
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
    """Whether a buffer is used by a norm and, later, by calls that write to it alone."""
    others = [user for user in statistic.users if user is not node]
    return statistic.op == "placeholder" and all(
        is_mutable(user) and user.args[0] is statistic and not user.users and node < user for user in others
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


def _norm(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    given = arguments(node)
    x = get(given["input"])
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


def _reduction(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    x, add = get(node.args[0]), program.add
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


def _loss(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    """The mean or sum over all elements of a loss of each."""
    given, add = arguments(node), program.add
    if int(given["reduction"]) not in (MEAN, SUM):
        raise UnsupportedError("a loss that is not reduced")
    x, wanted = get(node.args[0]), get(node.args[1])
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


def _scan(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
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
        return program.add(name, get(source))
    zeros = 0
    if scan is not node and first is None:
        zeros = program.logical[-1] - shape(source)[-1]
    elif is_call(source, aten.slice) and (padded := _after_zeros(source.args[0])) and source.args[1] != last:
        if argument(source, "start") in (None, 0) and argument(source, "step") == 1:
            zeros, source = padded
    elif padded := _after_zeros(source):
        zeros, source = padded
    if not zeros:
        return program.add(name, get(source))
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
    made = is_call(zeros, aten.zeros_like, aten.zeros, aten.new_zeros)
    return (shape(zeros)[dim], rest) if made and dim == len(shape(node)) - 1 else None


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
