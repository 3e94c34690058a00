"""pooling: computes indices that nobody reads; bound by memory."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CHANNELS, SIZE = 8, 32, 64


class Model(nn.Module):
    """Max pooling; the indices are dropped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1, return_indices=True)[0]


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return []
