"""gemm-extreme: inner size 16; bound by writing the product."""

import torch
from torch import nn

M, K, N = 8192, 16, 256


class Model(nn.Module):
    """Tall matrix times a small one."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(M, K), torch.randn(K, N)]


def get_init_inputs() -> list[int]:
    return []
