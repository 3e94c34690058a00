"""gemm+pointwise: constants that fit into weight and bias; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 256, 512, 512
SUBTRACT, MULTIPLY, DIVISOR = 0.3, 1.5, 0.5


class Model(nn.Module):
    """Linear layer, a shift, two scalings and a ReLU."""

    def __init__(
        self, in_features: int, out_features: int, subtract: float, multiply: float, divisor: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.subtract = subtract
        self.multiply = multiply
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = x - self.subtract
        x = x * self.multiply
        x = x / self.divisor
        return torch.relu(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int | float]:
    return [IN_FEATURES, OUT_FEATURES, SUBTRACT, MULTIPLY, DIVISOR]
