"""A drop-in for the reference module below.

Done: drop-indices, fuse-all-triton.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

images = 256
channels = 256
points = 1024


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        pass

    def forward(self, x):
        return torch.max(x, dim=1)[0]

import torch
import torch.nn.functional as F

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Without cancellation: a series near zero, exponentials elsewhere."""
    size = tl.abs(x)
    square = x * x
    series = -17.0 / 315 + square * (62.0 / 2835)
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * series)))
    small = tl.exp(-2.0 * size)
    large = (1.0 - small) / (1.0 + small)
    return tl.where(size < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def _log1p(x):
    """Exact to rounding also near zero: the error of 1 + x cancels in the quotient."""
    above = 1.0 + x
    ratio = tl.where(above == 1.0, 1.0, above - 1.0)
    return tl.where(above == 1.0, x, tl.where(x == float("inf"), x, tl.log(above) * (x / ratio)))


@triton.jit
def _expm1(x):
    """Exact to rounding also near zero, in the same way."""
    above = tl.exp(x)
    logarithm = tl.log(above)
    ratio = tl.where(logarithm == 0.0, 1.0, logarithm)
    close = (above - 1.0) * (x / ratio)
    return tl.where(above == 1.0, x, tl.where(tl.abs(x) > 1.0, above - 1.0, close))


@triton.jit
def _max_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min_or_nan(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _key(x, index):
    """An integer that is larger for a larger number, NaN the largest, and of equal numbers for an earlier one.

    The upper half is the number's size with its sign, so that both zeros are equal.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    number = tl.where(size > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -size, size))
    return (number.to(tl.int64) << 32) - index


@triton.jit
def _index_of(key):
    return -key & 0xFFFFFFFF


@triton.jit
def _product(x, y):
    return x * y


@triton.jit
def _to_tf32(x):
    """The nearest number of ten mantissa bits. Tensor cores would cut the other bits off, whose mean is not zero."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit
def _more_exponentials(total, largest, x):
    """A sum of exp(x - largest), with one more x: both terms are relative to the larger maximum."""
    above = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    above = tl.where(above == float("-inf"), 0.0, above)
    return total * tl.exp(largest - above) + tl.exp(x - above)


@triton.jit
def _all_exponentials(totals, largest):
    """One sum of exponentials, relative to the maximum of all, out of sums relative to maxima of their own."""
    above = tl.max(largest, axis=0)
    above = tl.where(above == float("-inf"), 0.0, above)
    return tl.sum(totals * tl.exp(largest - above), axis=0)


@triton.jit
def _more_squares(total, x, step):
    """What the last x of a total of step + 1 values adds to the sum of squared distances from their mean."""
    distance = x - total * (1.0 / (step + 1.0))
    return distance * distance * ((step + 1.0) / tl.maximum(step + 0.0, 1.0))


@triton.jit
def _all_squares(squares, totals, counts):
    """Squared distances from the mean of all, out of those from the means of parts."""
    mean = tl.sum(totals, axis=0) / tl.maximum(tl.sum(counts, axis=0), 1.0)
    distance = totals / tl.maximum(counts, 1.0) - mean
    return tl.sum(squares + counts * distance * distance, axis=0)


def _laid_out(tensor, strides):
    """The tensor with these strides: itself when it has them already."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Launch:
    """Launches a kernel on one grid.

    Triton's own launch looks at every argument in each call, which can take longer than the kernel. What it compiles depends
    on the device and on whether addresses are multiples of 16; where they are, later calls take what the first one compiled.
    """

    def __init__(self, kernel, grid, warps, *constants, **options):
        self.kernel, self.grid, self.warps, self.constants = kernel, (grid, 1, 1), warps, constants
        self.options = {"num_warps": warps, **options}
        self.compiled = {}

    def __call__(self, *tensors):
        if torch.compiler.is_compiling() or any(tensor.data_ptr() % 16 for tensor in tensors):
            return self.kernel[self.grid](*tensors, *self.constants, **self.options)
        device = tensors[0].device.index
        compiled = self.compiled.get(device)
        if compiled is None:
            self.compiled[device] = self.kernel[self.grid](*tensors, *self.constants, **self.options)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            given = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*self.grid, stream, *given, *tensors, *self.constants)

@triton.jit
def _fused_0_kernel(in0, out0):
    task = tl.program_id(0).to(tl.int64)
    column = (task % 32) * 32 + tl.arange(0, 32)[None, :]
    outer = task // 32
    i0 = outer
    in_columns = column < 1024
    row = tl.arange(0, 256)[:, None].to(tl.int32)
    in_rows = row < 256
    inside = in_rows & in_columns
    v0 = tl.load(in0 + i0 * 262144 + row * 1024 + column, mask=in_rows & in_columns, other=0.0)
    v1 = tl.reduce(tl.where(inside, v0, float("-inf")), combine_fn=_max_or_nan, axis=0, keep_dims=True)
    tl.store(out0 + i0 * 1024 + column, v1, mask=in_columns)


_fused_0_launch = _Launch(_fused_0_kernel, 8192, 8)


def fused_0(x0):
    x0 = _laid_out(x0, (262144, 1024, 1))
    y0 = x0.new_empty([256, 1024])
    _fused_0_launch(x0, y0)
    return y0

class ModelNew(Model):
    """The reference with another `forward` for the traced shapes and types; else `Model.forward` runs."""

    def forward(self, x):
        if not (not torch.is_grad_enabled() and x.is_cuda and x.shape == (256, 256, 1024) and x.dtype is torch.float32 and x.is_contiguous()):
            return super().forward(x)
        y = fused_0(x)
        return y
