"""conv+norm: batch statistics of a convolution; its bias is cancelled by the mean; bound by passes."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 8, 32, 48


class Model(nn.Module):
    """Convolution, batch norm in training mode, ReLU."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
