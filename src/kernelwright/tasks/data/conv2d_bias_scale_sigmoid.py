"""conv+pointwise: per-channel scale and bias behind a convolution; bound by compute and passes."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 8, 8, 32, 48


class Model(nn.Module):
    """Convolution, learned per-channel bias and scale, sigmoid."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))
        self.scale = nn.Parameter(torch.randn(out_channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = x + self.bias
        x = x * self.scale
        return torch.sigmoid(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
