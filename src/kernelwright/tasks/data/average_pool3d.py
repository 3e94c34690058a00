"""pooling: one operator; bound by memory and window reuse."""

import torch
from torch import nn

BATCH, CHANNELS, SIZE = 4, 8, 24


class Model(nn.Module):
    """Average pooling of volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool3d(kernel_size=3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return []
