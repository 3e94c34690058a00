import math

import torch
import torch.nn as nn
import torch.nn.functional as F

images = 16
channels = 64
size = 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        pass

    def forward(self, x):
        return x / torch.sqrt(torch.mean(x ** 2, dim=1, keepdim=True) + 1e-5)


def get_inputs():
    return [torch.randn(images, channels, size, size)]


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


_BLOCK_SIZE_1 = tl.constexpr(64)
_BLOCK_SIZE_0 = tl.constexpr(1)

@triton.jit
def _helion_rms_norm(x, out, _RDIM_SIZE_2: tl.constexpr):
    num_blocks_0 = 16
    pid_0 = tl.program_id(0) % num_blocks_0
    pid_1 = tl.program_id(0) // num_blocks_0
    offset_0 = pid_0
    indices_0 = offset_0 + tl.zeros([1], tl.int32)
    offset_1 = pid_1 * _BLOCK_SIZE_1
    indices_1 = (offset_1 + tl.arange(0, _BLOCK_SIZE_1)).to(tl.int32)
    indices_2 = tl.arange(0, _RDIM_SIZE_2).to(tl.int32)
    columns = tl.load(x + (indices_0[:, None, None] * 4194304 + (0 + indices_2)[None, :, None] * 65536 + indices_1[None, None, :] * 1), None)
    v_0 = columns * columns
    mean_extra = tl.cast(tl.reshape(tl.sum(v_0.to(tl.float32), 1), [_BLOCK_SIZE_0, 1, _BLOCK_SIZE_1]), tl.float32)
    v_1 = 64
    v_2 = tl.cast(v_1, tl.float32)
    v_3 = mean_extra / v_2
    v_4 = tl.full([], 1e-05, tl.float32)
    v_5 = v_3 + v_4
    v_6 = tl.sqrt_rn(v_5)
    v_7 = columns / v_6
    tl.store(out + (indices_0[:, None, None] * 4194304 + (0 + indices_2)[None, :, None] * 65536 + indices_1[None, None, :] * 1), v_7, None)

def rms_norm(x: torch.Tensor, *, _launcher=_launcher):
    n, _, s = x.size()
    out = torch.empty_like(x)
    _RDIM_SIZE_2 = 64
    _launcher(_helion_rms_norm, (16384,), x, out, _RDIM_SIZE_2, num_warps=4, num_stages=1)
    return out

class ModelNew(Model):
    """Helion's kernel for the shapes it was emitted for; else `Model.forward` runs."""

    def forward(self, x):
        tensors = (x, *self.parameters())
        if torch.is_grad_enabled() or not x.is_cuda or x.shape != (16, 64, 256, 256) or x.dtype is not torch.float32:
            return super().forward(x)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return super().forward(x)
        return rms_norm(x.view(images, channels, size * size)).view(x.shape)
