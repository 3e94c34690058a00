"""conv+pool: two poolings behind a convolution; bound by compute and passes."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 8, 32, 48


class Model(nn.Module):
    """Convolution, max pooling by two, twice, sharpened softmax over channels."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)
        self.first = nn.MaxPool2d(kernel_size=2)
        self.second = nn.MaxPool2d(kernel_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(4.0 * self.second(self.first(self.conv(x))), dim=1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
