"""convolution: transposed with stride two; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 4, 32, 32, 24


class Model(nn.Module):
    """Transposed convolution that doubles height and width."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, out_channels, kernel_size=4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
