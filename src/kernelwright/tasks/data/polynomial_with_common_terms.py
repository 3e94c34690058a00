"""elementwise: a quadratic evaluated term by term; bound by memory passes."""

import torch
from torch import nn

ROWS, COLUMNS = 512, 2048


class Model(nn.Module):
    """x^2 + x*b + x^2 + x, with a learned b."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, 2.0) + x * self.b + x * x + x


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[int]:
    return [COLUMNS]
