"""convolution: dilated, padded on the left only; bound by memory."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CHANNELS, LENGTH, KERNEL, DILATION = 8, 64, 1024, 3, 4


class Model(nn.Module):
    """Causal dilated convolution of sequences."""

    def __init__(self, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.left = (kernel - 1) * dilation
        self.conv = nn.Conv1d(channels, channels, kernel_size=kernel, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (self.left, 0)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, LENGTH)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, KERNEL, DILATION]
