"""convolution: depthwise, then pointwise; bound by the map between them."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 8, 32, 64, 48


class Model(nn.Module):
    """Depthwise separable convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels, bias=False)
        self.pointwise = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pointwise(self.depthwise(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
