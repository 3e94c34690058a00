"""norm: four rows of 589824 elements; bound by memory, starved of parallelism."""

import torch
from torch import nn

BATCH, CHANNELS, SIZE = 4, 64, 96


class Model(nn.Module):
    """Layer norm over channels, height and width."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((channels, size, size))
        nn.init.normal_(self.norm.weight, 1.0, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, SIZE]
