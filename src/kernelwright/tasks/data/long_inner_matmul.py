"""gemm-extreme: inner size 32768 and a small product; bound by reading, starved of parallelism."""

import torch
from torch import nn

M, K, N = 48, 32768, 48


class Model(nn.Module):
    """Product of a wide and a tall matrix."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(M, K), torch.randn(K, N)]


def get_init_inputs() -> list[int]:
    return []
