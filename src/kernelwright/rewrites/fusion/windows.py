"""Lowers pools, convolutions and halves that change places: each point reads a window of another tensor.

In pools and depthwise convolutions each tap is a load whose position moves with the point; outside the tensor it reads a
constant. Other convolutions are one step, which tiles on tensor cores compute. What follows is pointwise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import fx

from kernelwright.rewrites.fusion.program import (
    REAL,
    LoopProgram,
    Lowering,
    Operand,
    Pooled,
    UnsupportedError,
    Window,
)
from kernelwright.rewrites.graph import (
    argument,
    arguments,
    aten,
    is_call,
    is_tensor,
    numbers,
    read_once,
    shape,
    stretch_of,
    value,
)
from kernelwright.rewrites.rules.affine import CONVOLUTIONS, TRANSPOSED
from kernelwright.rewrites.rules.convolution import geometry
from kernelwright.rewrites.templates.convolution import ConvolutionSizes
from kernelwright.rewrites.templates.tf32_convolution import TF32

MAX_POOLS = (aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
AVERAGE_POOLS = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
MOST_PARTS = 4
"""Parts of a tensor that change places: each point reads all of them, all but one masked off. Our choice."""
MOST_TAPS = 128
"""Elements of a window: each is a load of its own in the kernel's text."""
MOST_PLACES = 64
"""Places of a window for each of which a convolution's kernel computes a tile. Our choice."""


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
    found = program.convolution
    if found is None or program.pooled or not is_call(node, *MAX_POOLS, *AVERAGE_POOLS):
        return None
    given, rank = arguments(node), len(found.kernel)
    window = numbers(given["kernel_size"], rank)
    apart = numbers(given["stride"], rank) or window
    plain = not any(numbers(given["padding"], rank)) and all(step == 1 for step in numbers(given.get("dilation", 1), rank))
    sizes = zip(program.logical[2:], window, strict=True)
    whole = not given["ceil_mode"] or all(size % width == 0 for size, width in sizes)
    # A tile has outputs at one residue of a transposed convolution's stride.
    steps = found.stride if found.transposed else (1,) * rank
    aligned = all(width % step == 0 for width, step in zip(window, steps, strict=True))
    if window != apart or not (plain and whole and aligned) or math.prod(window) > MOST_PLACES:
        return None
    return Pooled(program.logical, window)


def _pool(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    given = arguments(node)
    is_maximum = is_call(node, *MAX_POOLS)
    if program.pooled and node.args[0] in program.values:
        found = program.add("window_max" if is_maximum else "window_sum", get(node.args[0]))
        count = given.get("divisor_override") or math.prod(program.pooled.window)
        return found if is_maximum else program.add("div", found, float(count))
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


def _depthwise(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    found = geometry(node)
    if found is None or found.transposed or found.groups == 1 or shape(found.weight)[:2] != (found.groups, 1):
        raise UnsupportedError("not a depthwise convolution with one output for each channel")
    if value(found.weight).dtype not in REAL:
        raise UnsupportedError("the weight is not of real numbers")
    strides = value(found.weight).stride()

    def channel(source: fx.Node, stride: int, offset: int = 0) -> int:
        return program.load(source, [stride if dim == 1 else 0 for dim in range(len(program.logical))], offset)

    result: int | None = None
    taps = _taps(program, found.source, found.kernel, found.stride, found.padding, found.dilation)
    for place, tap in zip(itertools.product(*map(range, found.kernel)), taps, strict=True):
        offset = sum(at * stride for at, stride in zip(place, strides[2:], strict=True))
        product = program.add("mul", tap, channel(found.weight, strides[0], offset))
        result = product if result is None else program.add("add", result, product)
    if result is None:
        raise UnsupportedError("a window without taps")
    if found.bias is not None:
        result = program.add("add", result, channel(found.bias, 1))
    return result


def rearranged(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
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
        strides, shifts = value(source).stride(), tuple(-start if one == dim else 0 for one in range(rank))
        window = Window(shifts, (1,) * rank, shape(piece), 0.0)
        read = program.load(source, strides, (first - start) * strides[dim], window)
        steps.append(program.add("neg", read) if negated else read)
        start += shape(piece)[dim]
    if len(parts) > MOST_PARTS or len(sources) > 1 or not sources.isdisjoint(program.values):
        raise UnsupportedError("too many parts, or not of one tensor from outside")
    return functools.reduce(functools.partial(program.add, "add"), steps)


def _convolution(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    """Lowering of any convolution: a depthwise one by its taps, another one as a step that tiles compute."""
    try:
        if not program.pooled:
            return _depthwise(program, node, get)
    except UnsupportedError:
        pass
    found = geometry(node)
    if found is None or found.source in program.values or program.convolution:
        raise UnsupportedError("no convolution that tiles compute")
    if value(found.source).dtype not in REAL or value(found.weight).dtype != value(found.source).dtype:
        raise UnsupportedError("operands that are not of one type of real numbers")
    if TF32.refusal(ConvolutionSizes(found, shape(node))) is not None:
        raise UnsupportedError("no convolution that tiles compute")
    if program.reduced not in ((), (1,)) or program.split > 1:
        raise UnsupportedError("a reduction over more than the channels")
    program.convolution = found
    none = (0,) * len(program.logical)
    result = program.add("convolution", program.load(found.source, none), program.load(found.weight, none))
    if is_tensor(found.bias):
        bias = cast(fx.Node, found.bias)
        result = program.add("add", result, program.load(bias, (0, value(bias).stride()[0], *none[2:])))
    return result


WINDOWS: dict[Any, Lowering] = {
    **dict.fromkeys((*MAX_POOLS, *AVERAGE_POOLS), _pool),
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED), _convolution),
}
"""Lowering of each operator that reads windows."""
