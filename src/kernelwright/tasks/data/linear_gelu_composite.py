"""gemm+pointwise: an activation spelt out behind a matrix product; bound by compute and passes."""

import math

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 512, 64, 1024


class Model(nn.Module):
    """Linear layer and GELU by its tanh formula."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
