"""pooling: two poolings that are one; bound by memory passes."""

import torch
from torch import nn

BATCH, CHANNELS, SIZE = 8, 32, 64


class Model(nn.Module):
    """Average pooling by two, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.AvgPool2d(kernel_size=2)
        self.second = nn.AvgPool2d(kernel_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return []
