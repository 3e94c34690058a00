"""elementwise: seven operations with constants that are one affine map; bound by memory passes."""

import torch
from torch import nn

ROWS, COLUMNS = 512, 2048


class Model(nn.Module):
    """A chain of scalings and shifts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 4.0
        x = x * 3.0
        x = x + 1.5
        x = x / 0.5
        x = x - 2.0
        x = x * 1.0
        return x / 8.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[int]:
    return []
