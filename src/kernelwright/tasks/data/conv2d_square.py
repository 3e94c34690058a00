"""convolution: 3x3 on 32 channels; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 32, 64, 32


class Model(nn.Module):
    """Standard convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
