"""Rewrites convolutions and transposed convolutions as something smaller: another convolution, a product, or sums."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from kernelwright.rewrites.graph import (
    Editor,
    argument,
    aten,
    dims_of,
    is_call,
    is_tensor,
    numbers,
    read_once,
    shape,
)
from kernelwright.rewrites.rules.affine import (
    ADAPTIVE_POOLS,
    AVERAGE_POOLS,
    CONVOLUTIONS,
    TRANSPOSED,
    pools_plainly,
)
from kernelwright.rewrites.rules.base import each

CONVOLUTION_OF_RANK = dict(enumerate((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), 1))
TRANSPOSED_OF_RANK = dict(
    enumerate((aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input), 1)
)
POOL_OF_RANK = dict(enumerate((aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default), 1))


def window_counts(
    like: torch.Tensor,
    size_in: int,
    size_out: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    transposed: bool,
) -> torch.Tensor:
    """Which input positions each tap of a convolution touches, along one dimension.

    Returns:
        A (size_in, kernel) matrix: 1 where tap k multiplies input i for some output, else 0. Borders that
        padding cuts off are 0, so sums over all outputs are exact.
    """
    index = torch.arange(size_in, device=like.device)[:, None]
    tap = torch.arange(kernel, device=like.device)
    if transposed:
        output = index * stride - padding + tap * dilation
        touched = (output >= 0) & (output < size_out)
    else:
        output = index + padding - tap * dilation
        touched = (output >= 0) & (output % stride == 0) & (output < size_out * stride)
    return touched.to(like.dtype)


class Geometry(NamedTuple):
    """A convolution's arguments, with a number for each spatial dimension."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool


def geometry(node: Any) -> Geometry | None:
    """Read a convolution with a batch dimension and numeric padding; None when it is something else."""
    if not is_call(node, *CONVOLUTIONS, *TRANSPOSED) or isinstance(argument(node, "padding"), str):
        return None
    source, weight = argument(node, "input"), argument(node, "weight")
    rank = len(shape(weight)) - 2
    if len(shape(source)) != rank + 2:
        return None
    transposed = is_call(node, *TRANSPOSED)
    return Geometry(
        source,
        weight,
        argument(node, "bias"),
        shape(weight)[2:],
        numbers(argument(node, "stride"), rank),
        numbers(argument(node, "padding"), rank),
        numbers(argument(node, "dilation"), rank),
        numbers(argument(node, "output_padding"), rank) if transposed else (0,) * rank,
        int(argument(node, "groups")),
        transposed,
    )


def _convolution(editor: Editor, before: fx.Node, wanted: Geometry) -> fx.Node:
    """The convolution, not transposed, with these arguments."""
    steps = map(list, (wanted.stride, wanted.padding, wanted.dilation))
    target = CONVOLUTION_OF_RANK[len(wanted.stride)]
    return editor.call(before, target, wanted.source, wanted.weight, wanted.bias, *steps, wanted.groups)


@each(*TRANSPOSED)
def flip_transposed_convolution(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A transposed convolution of stride 1 is a convolution with the weight flipped and its channels swapped.

    Conditions: stride 1, no output padding, padding at most dilation * (kernel - 1).
    """
    found = geometry(node)
    if found is None or any(step != 1 for step in found.stride) or any(found.output_padding):
        return None
    padding = tuple(d * (k - 1) - p for d, k, p in zip(found.dilation, found.kernel, found.padding, strict=True))
    if any(size < 0 for size in padding):
        return None
    rank = len(found.kernel)
    flipped = editor.call(node, aten.flip.default, found.weight, list(range(2, rank + 2)))
    if found.groups == 1:
        weight = editor.call(node, aten.transpose.int, flipped, 0, 1)
    else:
        inputs, outputs = shape(flipped)[0] // found.groups, shape(flipped)[1]
        grouped = editor.reshape(node, flipped, [found.groups, inputs, outputs, *found.kernel])
        swapped = editor.call(node, aten.transpose.int, grouped, 1, 2)
        weight = editor.reshape(node, swapped, [found.groups * outputs, inputs, *found.kernel])
    return _convolution(editor, node, found._replace(weight=weight, padding=padding))


@each(*AVERAGE_POOLS)
def pool_into_stride(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A convolution and an average pool after it are one strided convolution with a smoothed, larger kernel.

    Conditions: stride and dilation 1 in the convolution and a kernel above 1; the pool's windows do not
    overlap and are not padded; no other reader. Arithmetic falls from k^n K^n to (K + k - 1)^n per result.
    """
    found = geometry(read_once(node.args[0], *CONVOLUTIONS))
    if found is None:
        return None
    rank = len(found.kernel)
    window = numbers(argument(node, "kernel_size"), rank)
    step = numbers(argument(node, "stride"), rank) or window
    if step != window or not pools_plainly(node) or any(size == 1 for size in found.kernel):
        return None
    if any(item != 1 for item in (*found.stride, *found.dilation)):
        return None
    border = [size - 1 for size in reversed(window) for _ in range(2)]
    padded = editor.call(node, aten.constant_pad_nd.default, found.weight, border, 0.0)
    smooth = editor.call(node, POOL_OF_RANK[rank], padded, list(window), [1] * rank)
    result = _convolution(editor, node, found._replace(weight=smooth, stride=window))
    return result if shape(result) == shape(node) else None


@each(*AVERAGE_POOLS)
def pool_into_transposed_convolution(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A transposed convolution and an average pool over whole strides of it are one convolution of the input.

    A window of c strides holds each phase of the output c times, so the weight that an input meets in it is an average of
    taps: result m is the sum over q of input m * c - q times the mean of the taps q * stride + padding + 0, 1, ... of the
    window. Conditions: dilation 1 and one group; the pool's windows are multiples of the stride, do not overlap and are
    not padded; no other reader. The transposed convolution's output, larger than the result by the window, is not made.
    """
    found = geometry(read_once(node.args[0], *TRANSPOSED))
    if found is None or found.groups != 1 or any(step != 1 for step in found.dilation) or not pools_plainly(node):
        return None
    rank = len(found.kernel)
    window = numbers(argument(node, "kernel_size"), rank)
    step = numbers(argument(node, "stride"), rank) or window
    if step != window or any(width % apart for width, apart in zip(window, found.stride, strict=True)):
        return None
    weight_borders, borders, steps = [], [], []
    dims = zip(window, found.stride, found.padding, found.kernel, shape(found.source)[2:], shape(node)[2:], strict=True)
    for width, apart, padding, taps, size, results in dims:
        first, last = -((width - 1 + padding) // apart), (taps - 1 - padding) // apart
        weight_borders.append((-(first * apart + padding), last * apart + padding + width - taps))
        steps.append(width // apart)
        borders.append((last, (results - 1) * steps[-1] + 1 - first - size))
    padded = editor.call(node, aten.constant_pad_nd.default, found.weight, _flat(weight_borders), 0.0)
    smooth = editor.call(node, POOL_OF_RANK[rank], padded, list(window), list(found.stride))
    flipped = editor.call(node, aten.flip.default, smooth, list(range(2, rank + 2)))
    weight = editor.call(node, aten.transpose.int, flipped, 0, 1)
    source, even = found.source, tuple(before for before, after in borders if before == after >= 0)
    if len(even) < rank:
        source, even = editor.call(node, aten.constant_pad_nd.default, source, _flat(borders), 0.0), (0,) * rank
    ordinary = found._replace(source=source, weight=weight, stride=tuple(steps), padding=even)
    result = _convolution(editor, node, ordinary)
    return result if shape(result) == shape(node) else None


def _flat(borders: list[tuple[int, int]]) -> list[int]:
    """Borders of each dimension as `constant_pad_nd` takes them: the last dimension's first."""
    return [size for pair in reversed(borders) for size in pair]


@each(aten.mean, aten.sum, *ADAPTIVE_POOLS)
def reduce_before_convolution(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A sum or mean over spatial dimensions of a convolution needs only sums of its input.

    Every output that is summed multiplies tap k with a known set of inputs, so the input is summed over that
    set first (`window_counts`, exact at padded borders) and the convolution keeps only the dimensions that
    are left. Conditions: one group; the reduced dimensions are spatial; no other reader.
    """
    convolution = read_once(node.args[0])
    found = geometry(convolution)
    if node.kwargs or convolution is None or found is None or found.groups != 1:
        return None
    rank = len(found.kernel)
    if is_call(node, *ADAPTIVE_POOLS):
        if any(size != 1 for size in shape(node)[2:]):
            return None
        dims: tuple[int, ...] | None = tuple(range(2, rank + 2))
    else:
        dims = dims_of(argument(node, "dim"), rank + 2)
    if not dims or any(dim < 2 for dim in dims):
        return None
    return _reduced_convolution(editor, node, convolution, found, [dim - 2 for dim in dims])


def _reduced_convolution(
    editor: Editor, node: fx.Node, convolution: fx.Node, found: Geometry, reduced: list[int]
) -> fx.Node:
    rank = len(found.kernel)
    left, removed = [dim for dim in range(rank) if dim not in reduced], sorted(reduced, reverse=True)
    sizes_in, sizes_out = shape(found.source)[2:], shape(convolution)[2:]
    batch, channels = shape(found.source)[:2]
    summed, weight = found.source, found.weight
    # The input becomes (batch, channels, left..., taps...), the taps in the order of `removed`.
    for dim in removed:
        last = len(shape(summed)) - 1
        order = [*(axis for axis in range(last + 1) if axis != 2 + dim), 2 + dim]
        if order != list(range(last + 1)):
            summed = editor.call(node, aten.permute.default, summed, order)
        if found.transposed and found.padding[dim] == 0:
            # Without a border every tap meets every input once, so the taps can be summed as well.
            summed = editor.call(node, aten.sum.dim_IntList, summed, [last], True)
            weight = editor.call(node, aten.sum.dim_IntList, weight, [2 + dim], True)
        else:
            counts = editor.call(
                node,
                window_counts,
                found.source,
                sizes_in[dim],
                sizes_out[dim],
                found.kernel[dim],
                found.stride[dim],
                found.padding[dim],
                found.dilation[dim],
                found.transposed,
            )
            summed = editor.call(node, aten.matmul.default, summed, counts)
    taps = shape(summed)[2 + len(left) :]
    folded = channels * math.prod(taps)
    input_axis, output_axis = (0, 1) if found.transposed else (1, 0)
    outputs = shape(weight)[output_axis]
    channel_axes = [input_axis, *(2 + dim for dim in removed)]
    input_first = found.transposed or not left
    order = [*channel_axes, output_axis] if input_first else [output_axis, *channel_axes]
    arranged = editor.call(node, aten.permute.default, weight, [*order, *(2 + dim for dim in left)])
    pair = [folded, outputs] if input_first else [outputs, folded]
    kernel = editor.call(node, aten.reshape.default, arranged, [*pair, *(found.kernel[dim] for dim in left)])
    if left:
        axes = [0, 1, *range(2 + len(left), 2 + rank), *range(2, 2 + len(left))]
        source = editor.call(node, aten.permute.default, summed, axes)
        source = editor.call(node, aten.reshape.default, source, [batch, folded, *(sizes_in[dim] for dim in left)])
        stride, padding, dilation = ([items[dim] for dim in left] for items in (found.stride, found.padding, found.dilation))
        if found.transposed:
            extra = [found.output_padding[dim] for dim in left]
            target = TRANSPOSED_OF_RANK[len(left)]
            result = editor.call(node, target, source, kernel, None, stride, padding, extra, 1, dilation)
        else:
            result = editor.call(node, CONVOLUTION_OF_RANK[len(left)], source, kernel, None, stride, padding, dilation, 1)
    else:
        flat = editor.reshape(node, summed, [batch, folded])
        result = editor.call(node, aten.matmul.default, flat, kernel)
    count = math.prod(sizes_out[dim] for dim in reduced)
    if not is_call(node, aten.sum):
        result = editor.call(node, aten.mul.Tensor, result, 1.0 / count)
    if found.bias is not None and is_tensor(found.bias):
        bias = editor.call(node, aten.reshape.default, found.bias, [outputs, *[1] * len(left)])
        if is_call(node, aten.sum):
            bias = editor.call(node, aten.mul.Tensor, bias, float(count))
        result = editor.call(node, aten.add.Tensor, result, bias)
    return editor.reshape(node, result, shape(node))
