"""Lowers pools and depthwise convolutions: each point reads a window of another tensor, tap by tap.

A tap is a load whose position moves with the point. Outside the tensor it reads a constant. What follows is pointwise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from kernelwright.rewrites.fusion.program import DTYPE, LoopProgram, Lowering, Operand, UnsupportedError, Window
from kernelwright.rewrites.graph import arguments, aten, is_call, is_tensor, numbers, shape, value
from kernelwright.rewrites.rules.convolution import geometry

MAX_POOLS = (aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
AVERAGE_POOLS = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
MOST_TAPS = 128
"""Elements of a window: each is a load of its own in the kernel's text."""


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
        UnsupportedError: the tensor is made in this program or is not float32, or the window has too many taps.
    """
    if not is_tensor(source) or value(source).dtype != DTYPE or source in program.values or program.reduced:
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


def _pool(program: LoopProgram, node: fx.Node, get: Callable[[Any], Operand]) -> int:
    given = arguments(node)
    is_maximum = is_call(node, *MAX_POOLS)
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
    if value(found.weight).dtype != DTYPE:
        raise UnsupportedError("the weight is not float32")
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


WINDOWS: dict[Any, Lowering] = {
    **dict.fromkeys((*MAX_POOLS, *AVERAGE_POOLS), _pool),
    **dict.fromkeys(CONVOLUTIONS, _depthwise),
}
"""Lowering of each operator that reads windows."""
