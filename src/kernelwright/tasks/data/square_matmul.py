"""gemm: one square matrix product; bound by compute."""

import torch
from torch import nn

N = 512


class Model(nn.Module):
    """Product of two square matrices."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(N, N), torch.randn(N, N)]


def get_init_inputs() -> list[int]:
    return []
