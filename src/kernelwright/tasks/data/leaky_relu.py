"""elementwise: one operator; bound by memory, nothing to fuse."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, COLUMNS = 1024, 2048
NEGATIVE_SLOPE = 0.1


class Model(nn.Module):
    """Leaky ReLU."""

    def __init__(self, negative_slope: float) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x, negative_slope=self.negative_slope)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[float]:
    return [NEGATIVE_SLOPE]
