"""convolution: kernel equal to stride, so a matrix product of patches; bound by compute."""

import torch
from torch import nn

BATCH, CHANNELS, SIZE, PATCH, FEATURES = 4, 3, 128, 16, 256


class Model(nn.Module):
    """Non-overlapping patches projected to tokens."""

    def __init__(self, channels: int, patch: int, features: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, features, kernel_size=patch, stride=patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).flatten(2).transpose(1, 2).contiguous()


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, PATCH, FEATURES]
