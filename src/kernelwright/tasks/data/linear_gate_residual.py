"""gemm+pointwise: gate, scale and residual behind a matrix product; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 256, 512, 512
SCALE = 2.0


class Model(nn.Module):
    """Linear layer, its own sigmoid as gate, a scale and a residual."""

    def __init__(self, in_features: int, out_features: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.sigmoid(y) * y * self.scale + y


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int | float]:
    return [IN_FEATURES, OUT_FEATURES, SCALE]
