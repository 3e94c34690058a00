import math

import torch
import torch.nn as nn
import torch.nn.functional as F

rows = 16384
columns = 2048


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(columns)

    def forward(self, x):
        return self.norm(x)


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


_BLOCK_SIZE_0 = tl.constexpr(1)

@triton.jit
def _helion_layer_norm(x, weight, bias, out, _RDIM_SIZE_1: tl.constexpr):
    pid_0 = tl.program_id(0)
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int32)
    indices_1 = tl.arange(0, _RDIM_SIZE_1).to(tl.int32)
    row = tl.load(x + (indices_0[:, None] * 2048 + (0 + indices_1)[None, :] * 1), None)
    var_mean_extra = tl.cast(tl.reshape(tl.sum(row.to(tl.float32), 1), [_BLOCK_SIZE_0, 1]), tl.float32)
    v_0 = 2048
    v_1 = tl.cast(v_0, tl.float32)
    v_2 = var_mean_extra / v_1
    v_3 = row - v_2
    v_4 = v_3 * v_3
    var_mean_extra_2 = tl.cast(tl.reshape(tl.sum(v_4.to(tl.float32), 1), [_BLOCK_SIZE_0, 1]), tl.float32)
    v_5 = 2048
    v_6 = tl.cast(v_5, tl.float32)
    v_7 = var_mean_extra_2 / v_6
    v_8 = row - v_2
    v_9 = tl.full([], 1e-05, tl.float32)
    v_10 = v_7 + v_9
    v_11 = libdevice.rsqrt(v_10)
    v_12 = v_8 * v_11
    load_1 = tl.load(weight + (0 + indices_1)[None, :] * 1, None)
    v_13 = v_12 * load_1
    load_2 = tl.load(bias + (0 + indices_1)[None, :] * 1, None)
    v_14 = v_13 + load_2
    tl.store(out + (indices_0[:, None] * 2048 + (0 + indices_1)[None, :] * 1), v_14, None)

def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, _launcher=_launcher):
    out = torch.empty_like(x)
    _RDIM_SIZE_1 = 2048
    _launcher(_helion_layer_norm, (16384,), x, weight, bias, out, _RDIM_SIZE_1, num_warps=8, num_stages=1)
    return out

class ModelNew(Model):
    """Helion's kernel for the shapes it was emitted for; else `Model.forward` runs."""

    def forward(self, x):
        tensors = (x, *self.parameters())
        if torch.is_grad_enabled() or not x.is_cuda or x.shape != (16384, 2048) or x.dtype is not torch.float32:
            return super().forward(x)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return super().forward(x)
        return layer_norm(x, self.norm.weight, self.norm.bias)
