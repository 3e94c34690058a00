"""conv+norm: group norm whose output is only averaged; bound by passes."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE, GROUPS = 8, 8, 32, 48, 4


class Model(nn.Module):
    """Convolution, group norm with a learned scale per channel, mean over height and width."""

    def __init__(self, channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(groups, out_channels)
        nn.init.normal_(self.norm.weight, 1.0, 0.2)
        nn.init.normal_(self.norm.bias, 0.0, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mean(self.norm(self.conv(x)), dim=(2, 3))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS, GROUPS]
