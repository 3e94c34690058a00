import math

import torch
import torch.nn as nn
import torch.nn.functional as F

rows = 4096
columns = 16384


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        pass

    def forward(self, x):
        return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.randn(rows, columns)]


def get_init_inputs():
    return []


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


_LAUNCHES = {}


def _launcher(kernel, grid, *arguments, num_warps, **options):
    """Launches as the kernels of our own printers are launched. Tensors come before constants."""
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    launch = _LAUNCHES.get(kernel)
    if launch is None:
        assert len(grid) == 1
        launch = _LAUNCHES[kernel] = _Launch(kernel, grid[0], num_warps, *arguments[len(tensors) :], **options)
    launch(*tensors)



import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _maximum_propagate_nan(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _promote_to_32_bits(x: tl.tensor) -> tl.tensor:
    # As tl.max/tl.min do: the combine's operands and result share one type,
    # and tl.maximum computes bf16 in fp32.
    if tl.constexpr(x.dtype.primitive_bitwidth) < tl.constexpr(32):
        if tl.constexpr(x.dtype.is_floating()):
            x = x.to(tl.float32)
        else:
            x = x.to(tl.int32)
    return x


@triton.jit
def max_propagate_nan(x: tl.tensor, dim: tl.constexpr) -> tl.tensor:
    """``tl.max`` that returns NaN when any element is NaN, as ``torch.amax`` does.

    Each combine step is one ``max.NaN``; Inductor's ``triton_helpers.max2``
    spends four or five compares and selects on it.
    """
    return tl.reduce(_promote_to_32_bits(x), dim, _maximum_propagate_nan)  # pyrefly: ignore [bad-return]


_BLOCK_SIZE_0 = tl.constexpr(1)

@triton.jit
def _helion_softmax(x, out, _RDIM_SIZE_1: tl.constexpr):
    pid_0 = tl.program_id(0)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int32)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int32)
    load = tl.load(x + (indices_0[:, None] * 16384 + (0 + indices_1)[None, :] * 1), None)
    amax = tl.cast(tl.reshape(max_propagate_nan(load, 1), [_BLOCK_SIZE_0, 1]), tl.float32)
    v_0 = load - amax
    v_1 = libdevice.exp(v_0)
    sum_1 = tl.cast(tl.reshape(tl.sum(v_1.to(tl.float32), 1), [_BLOCK_SIZE_0, 1]), tl.float32)
    v_2 = v_1 / sum_1
    tl.store(out + (indices_0[:, None] * 16384 + (0 + indices_1)[None, :] * 1), v_2, None)

def softmax(x: torch.Tensor, *, _launcher=_launcher):
    out = torch.empty_like(x)
    _RDIM_SIZE_1 = 16384
    _launcher(_helion_softmax, (4096,), x, out, _RDIM_SIZE_1, num_warps=8, num_stages=1)
    return out

class ModelNew(Model):
    """Helion's kernel for the shapes it was emitted for; else `Model.forward` runs."""

    def forward(self, x):
        tensors = (x, *self.parameters())
        if torch.is_grad_enabled() or not x.is_cuda or x.shape != (4096, 16384) or x.dtype is not torch.float32:
            return super().forward(x)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return super().forward(x)
        return softmax(x)
