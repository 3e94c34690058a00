"""gemm: half of the computed product is thrown away; bound by compute."""

import torch
from torch import nn

N = 512


class Model(nn.Module):
    """Lower triangle of a product of two dense matrices."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tril(a @ b)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(N, N), torch.randn(N, N)]


def get_init_inputs() -> list[int]:
    return []
