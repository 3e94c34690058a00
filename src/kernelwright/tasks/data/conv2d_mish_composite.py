"""conv+pointwise: shift and Mish spelt out behind a convolution; bound by compute and passes."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 8, 32, 48


class Model(nn.Module):
    """Convolution, shift, x times the tanh of its softplus."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) - 0.2
        return x * torch.tanh(F.softplus(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
