"""conv+pool: a transposed convolution averaged over the whole map; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, OUT_CHANNELS, SIZE = 8, 16, 32, 24


class Model(nn.Module):
    """Transposed convolution, global average, learned bias, scale."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, out_channels, kernel_size=3)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.mean(self.conv(x), dim=(2, 3), keepdim=True)
        return (x + self.bias) * 10.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, OUT_CHANNELS]
