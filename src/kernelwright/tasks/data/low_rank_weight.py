"""gemm+pointwise: a weight is rebuilt from its factors at every call; bound by compute."""

import torch
from torch import nn

BATCH, FEATURES, RANK = 64, 512, 16


class Model(nn.Module):
    """Low-rank update added to a linear layer, in its dense form."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.down = nn.Parameter(torch.randn(rank, features) / features**0.5)
        self.up = nn.Parameter(torch.randn(features, rank) / rank**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ (self.up @ self.down).T


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, RANK]
