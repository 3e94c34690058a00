"""gemm-extreme: matrix times vector; bound by reading the matrix."""

import torch
from torch import nn

M, K = 4096, 2048


class Model(nn.Module):
    """Matrix times vector."""

    def forward(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return a @ v


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(M, K), torch.randn(K, 1)]


def get_init_inputs() -> list[int]:
    return []
