"""conv+pointwise: activations that dominate each other behind a convolution; bound by compute and passes."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 8, 8, 32, 48


class Model(nn.Module):
    """Convolution, ReLU, leaky ReLU, scaling, clamp and division."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        x = F.leaky_relu(x, negative_slope=0.01)
        x = torch.clamp(x * 2.0, min=0.0, max=1.5)
        return x / 2.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
