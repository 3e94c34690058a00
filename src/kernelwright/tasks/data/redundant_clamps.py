"""elementwise: six bounded operations where one clamp is enough; bound by memory passes."""

import torch
from torch import nn

ROWS, COLUMNS = 512, 2048


class Model(nn.Module):
    """Clamps and scalings around a ReLU that they dominate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.clamp(x, min=-1.0, max=2.0)
        x = torch.relu(x)
        x = x * 2.0
        x = torch.clamp(x, min=-0.5, max=2.5)
        x = torch.relu(x)
        return x / 2.0


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(ROWS, COLUMNS)]


def get_init_inputs() -> list[int]:
    return []
