"""gemm: a product of three factors in the costly order; bound by compute."""

import torch
from torch import nn

N, K, COLUMNS = 512, 512, 8


class Model(nn.Module):
    """Two square matrices applied to a thin one."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (a @ b) @ v


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(N, K) / K**0.5, torch.randn(K, N) / N**0.5, torch.randn(N, COLUMNS)]


def get_init_inputs() -> list[int]:
    return []
