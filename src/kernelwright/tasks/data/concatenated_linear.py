"""gemm+pointwise: two inputs are copied together before a product; bound by compute and a copy."""

import torch
from torch import nn

BATCH, LEFT, RIGHT, OUT_FEATURES = 2048, 192, 64, 64


class Model(nn.Module):
    """Linear layer of two inputs side by side."""

    def __init__(self, left: int, right: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(left + right, out_features)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([a, b], dim=1)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, LEFT), torch.randn(BATCH, RIGHT)]


def get_init_inputs() -> list[int]:
    return [LEFT, RIGHT, OUT_FEATURES]
