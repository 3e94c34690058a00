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
        return torch.sum(x, dim=1, keepdim=True)


def get_inputs():
    return [torch.randn(images, channels, points)]


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


_BLOCK_SIZE_1 = tl.constexpr(128)
_BLOCK_SIZE_0 = tl.constexpr(1)

@triton.jit
def _helion_middle_sum(x, out, _REDUCTION_BLOCK_2: tl.constexpr):
    num_blocks_0 = 256
    pid_0 = tl.program_id(0) % num_blocks_0
    pid_1 = tl.program_id(0) // num_blocks_0
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int32)
    offset_1 = pid_1 * _BLOCK_SIZE_1
    indices_1 = (offset_1 + tl.arange(0, _BLOCK_SIZE_1)).to(tl.int32)
    sum_1_acc = tl.full([_BLOCK_SIZE_0, _REDUCTION_BLOCK_2, _BLOCK_SIZE_1], 0, tl.float32)
    for roffset_2 in tl.range(0, 256, _REDUCTION_BLOCK_2):
        rindex_2 = roffset_2 + tl.arange(0, _REDUCTION_BLOCK_2).to(tl.int32)
        load = tl.load(x + (indices_0[:, None, None] * 262144 + (0 + rindex_2)[None, :, None] * 1024 + indices_1[None, None, :] * 1), None)
        v_0 = sum_1_acc + load
        sum_1_acc = v_0
    sum_1 = tl.cast(tl.sum(sum_1_acc.to(tl.float32), 1), tl.float32)
    tl.store(out + (indices_0[:, None] * 1024 + indices_1[None, :] * 1), sum_1, None)

def middle_sum(x: torch.Tensor, *, _launcher=_launcher):
    n, _, s = x.size()
    out = torch.empty([n, 1, s], dtype=x.dtype, device=x.device)
    _REDUCTION_BLOCK_2 = 64
    _launcher(_helion_middle_sum, (2048,), x, out, _REDUCTION_BLOCK_2, num_warps=8, num_stages=1)
    return out

class ModelNew(Model):
    """Helion's kernel for the shapes it was emitted for; else `Model.forward` runs."""

    def forward(self, x):
        tensors = (x, *self.parameters())
        if torch.is_grad_enabled() or not x.is_cuda or x.shape != (256, 256, 1024) or x.dtype is not torch.float32:
            return super().forward(x)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return super().forward(x)
        return middle_sum(x)
