"""cnn-block: 1x1 convolution on four times the pixels that survive pooling; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 64, 32, 32


class Model(nn.Module):
    """Batch norm, ReLU, 1x1 convolution, average pooling."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(torch.relu(self.norm(x))))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
