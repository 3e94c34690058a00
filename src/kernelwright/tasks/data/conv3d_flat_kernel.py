"""convolution: 3D with depth one in the kernel, so 2D; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE, DEPTH = 4, 8, 16, 32, 12


class Model(nn.Module):
    """3D convolution whose kernel spans one slice."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out_channels, kernel_size=(3, 3, 1), padding=(1, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE, DEPTH)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
