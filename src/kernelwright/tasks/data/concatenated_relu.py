"""elementwise: two maps computed apart and copied together; bound by memory passes."""

import torch
from torch import nn

BATCH, CHANNELS, SIZE = 8, 32, 64


class Model(nn.Module):
    """ReLU of x and of -x side by side along the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(x), torch.relu(-x)], dim=1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return []
