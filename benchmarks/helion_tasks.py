"""The tasks of `helion_trial.py`, and how a module calls the Helion kernel for each. Nothing here needs Helion.

Shapes are CUDA-L1's where a call takes long enough to be measured, and larger ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One task, the Helion kernel for it, and how its module calls that kernel."""

    name: str
    forward: str
    """Expression of the reference."""
    inputs: str
    sizes: Mapping[str, int]
    small: Mapping[str, int]
    """Sizes for the interpreter."""
    call: str
    """Expression of the candidate."""
    kernel: str
    init: str = "pass"
    others: tuple[Mapping[str, Any], ...] = ()
    """Changes to Helion's default configuration."""
    names: str = "x"
    """Arguments of `forward`."""
    also: str = ""
    """Another kernel that may be called in place of the first."""

    def source(self, sizes: Mapping[str, int]) -> str:
        """The task in KernelBench's format."""
        constants = "\n".join(f"{name} = {size}" for name, size in sizes.items())
        return TASK.format(
            constants=constants, **{key: getattr(self, key) for key in ("init", "names", "forward", "inputs")}
        )


TASK = """import math

import torch
import torch.nn as nn
import torch.nn.functional as F

{constants}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
MIDDLE: dict[str, Any] = {
    "inputs": "torch.randn(images, channels, points)",
    "sizes": {"images": 256, "channels": 256, "points": 1024},
    "small": {"images": 3, "channels": 64, "points": 128},
    "others": (
        {"block_sizes": [1, 32], "num_warps": 8},
        {"block_sizes": [1, 128], "num_warps": 8, "reduction_loops": [64]},
    ),
}
PRODUCT: dict[str, Any] = {
    "forward": "F.hardtanh(F.gelu(torch.tanh(F.silu(self.gemm(x) + self.add))), -1, 1)",
    "inputs": "torch.randn(rows, depth)",
    "sizes": {"rows": 1024, "depth": 8192, "columns": 8192},
    "small": {"rows": 256, "depth": 64, "columns": 256},
    "init": "self.gemm, self.add = nn.Linear(depth, columns), nn.Parameter(torch.randn(columns))",
}
PRODUCT_ARGUMENTS = "(x, self.gemm.weight, self.gemm.bias, self.add)"
TRIALS = (
    Trial(
        "softmax",
        "torch.softmax(x, dim=1)",
        "torch.randn(rows, columns)",
        {"rows": 4096, "columns": 16384},
        {"rows": 3, "columns": 256},
        "softmax(x)",
        "softmax",
        others=({"num_warps": 32}, {"num_warps": 8}, {"reduction_loops": [4096], "num_warps": 8}),
    ),
    Trial(
        "layer_norm",
        "self.norm(x)",
        "torch.randn(rows, columns)",
        {"rows": 16384, "columns": 2048},
        {"rows": 4, "columns": 256},
        "layer_norm(x, self.norm.weight, self.norm.bias)",
        "layer_norm",
        "self.norm = nn.LayerNorm(columns)",
        ({"block_sizes": [1], "num_warps": 4}, {"block_sizes": [1], "num_warps": 8}),
    ),
    Trial(
        "rms_norm",
        "x / torch.sqrt(torch.mean(x ** 2, dim=1, keepdim=True) + 1e-5)",
        "torch.randn(images, channels, size, size)",
        {"images": 16, "channels": 64, "size": 256},
        {"images": 2, "channels": 8, "size": 16},
        "rms_norm(x.view(images, channels, size * size)).view(x.shape)",
        "rms_norm",
        others=({"block_sizes": [1, 128], "num_warps": 8}, {"block_sizes": [1, 64]}),
    ),
    Trial(
        "middle_sum",
        "torch.sum(x, dim=1, keepdim=True)",
        call="middle_sum(x)",
        kernel="middle_sum",
        **MIDDLE,
    ),
    Trial("middle_max", "torch.max(x, dim=1)[0]", call="middle_max(x)", kernel="middle_max", **MIDDLE),
    Trial(
        "cumsum",
        "torch.cumsum(x, dim=1)",
        "torch.randn(rows, columns)",
        {"rows": 32768, "columns": 4000},
        {"rows": 32, "columns": 500},
        "cumsum(x)",
        "cumsum",
        others=(
            {"block_sizes": [1], "num_warps": 4},
            {"block_sizes": [1], "num_warps": 8},
            {"block_sizes": [2], "num_warps": 8},
        ),
    ),
    Trial(
        "product",
        call=f"product_tf32x3{PRODUCT_ARGUMENTS}",
        kernel="product_tf32x3",
        also="product_ieee",
        others=(
            {"block_sizes": [128, 128, 32], "num_stages": 3, "l2_groupings": [8]},
            {"block_sizes": [128, 256, 32], "num_stages": 3, "l2_groupings": [8]},
            {"block_sizes": [64, 128, 32], "num_warps": 4, "num_stages": 3, "l2_groupings": [8]},
        ),
        **PRODUCT,
    ),
    Trial(
        "new_gelu",
        "0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))",
        "torch.randn(rows, columns)",
        {"rows": 8192, "columns": 8192},
        {"rows": 4, "columns": 1024},
        "new_gelu(x)",
        "new_gelu",
        others=({"block_sizes": [1, 4096], "num_warps": 8}, {"block_sizes": [1, 512]}),
    ),
    Trial(
        "instance_norm",
        "self.norm(x)",
        "torch.randn(images, channels, size, size)",
        {"images": 16, "channels": 64, "size": 256},
        {"images": 2, "channels": 3, "size": 64},
        "instance_norm(x.view(images * channels, size * size)).view(x.shape)",
        "instance_norm",
        "self.norm = nn.InstanceNorm2d(channels)",
        ({"reduction_loops": [4096], "num_warps": 8}, {"reduction_loops": [8192], "num_warps": 16}),
    ),
    Trial(
        "average_pool",
        "self.pool(x)",
        "torch.randn(images, channels, size, size)",
        {"images": 16, "channels": 64, "size": 256},
        {"images": 2, "channels": 2, "size": 32},
        "average_pool(x.view(images * channels, size, size)).view(images, channels, size // 3, size // 3)",
        "average_pool",
        "self.pool = nn.AvgPool2d(3)",
        ({"block_sizes": [1, 8, 128], "num_warps": 4}, {"block_sizes": [1, 4, 128], "num_warps": 8}),
    ),
    # For these two our printers have nothing.
    Trial("middle_argmax", "torch.argmax(x, dim=1)", call="middle_argmax(x)", kernel="middle_argmax", **MIDDLE),
    Trial(
        "cross_entropy",
        "F.cross_entropy(x, target)",
        "torch.randn(rows, columns), torch.randint(0, columns, (rows,))",
        {"rows": 8192, "columns": 16384},
        {"rows": 4, "columns": 256},
        "cross_entropy(x, target)",
        "cross_entropy",
        others=({"num_warps": 8}, {"num_warps": 32}),
        names="x, target",
    ),
)
