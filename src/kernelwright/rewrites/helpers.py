"""Holds functions whose source is copied into candidates. Each stands alone: `torch` is all it needs."""

from __future__ import annotations

import torch


def heads_inside_on_gpu(result: torch.Tensor) -> torch.Tensor:
    """An attention's result (batch, heads, queries, width) as PyTorch's kernel for wide heads lays it out on a GPU."""
    return result.transpose(1, 2).contiguous().transpose(1, 2) if result.is_cuda else result


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


def lower_triangle_of_product(left: torch.Tensor, right: torch.Tensor, diagonal: int, blocks: int) -> torch.Tensor:
    """`(left @ right).tril(diagonal)` for matrices, without most of the products that are thrown away.

    Rows are taken in blocks; of each, only the columns that can be kept are computed.
    """
    rows, columns = left.shape[0], right.shape[1]
    result = left.new_zeros(rows, columns)
    step = -(-rows // blocks)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        width = min(max(stop + diagonal, 0), columns)
        if width:
            result[start:stop, :width] = torch.tril(left[start:stop] @ right[:, :width], diagonal + start)
    return result


def upper_triangle_of_product(left: torch.Tensor, right: torch.Tensor, diagonal: int, blocks: int) -> torch.Tensor:
    """`(left @ right).triu(diagonal)` for matrices, without most of the products that are thrown away."""
    rows, columns = left.shape[0], right.shape[1]
    result = left.new_zeros(rows, columns)
    step = -(-rows // blocks)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first = min(max(start + diagonal, 0), columns)
        if first < columns:
            result[start:stop, first:] = torch.triu(left[start:stop] @ right[:, first:], diagonal + start - first)
    return result
