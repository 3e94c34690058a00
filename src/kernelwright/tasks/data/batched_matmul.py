"""gemm: sixteen independent products; bound by compute."""

import torch
from torch import nn

BATCH, M, K, N = 16, 128, 256, 128


class Model(nn.Module):
    """Batched matrix product."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a, b)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, M, K), torch.randn(BATCH, K, N)]


def get_init_inputs() -> list[int]:
    return []
