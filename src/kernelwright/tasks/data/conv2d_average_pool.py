"""conv+pool: the pooled map is a strided convolution; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE, POOL = 8, 8, 32, 48, 4


class Model(nn.Module):
    """Convolution, average pooling, sigmoid of four times that."""

    def __init__(self, channels: int, out_channels: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3)
        self.pool = nn.AvgPool2d(kernel_size=pool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(4.0 * self.pool(self.conv(x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS, POOL]
