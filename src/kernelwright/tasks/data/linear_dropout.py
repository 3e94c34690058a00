"""mlp: the one task that draws random numbers in forward; bound by compute."""

import torch
from torch import nn

BATCH, FEATURES, HIDDEN = 256, 256, 512
DROP = 0.2


class Model(nn.Module):
    """Linear layer, dropout in training mode, linear layer."""

    def __init__(self, features: int, hidden: int, drop: float) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.drop = nn.Dropout(p=drop)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, FEATURES)]


def get_init_inputs() -> list[int | float]:
    return [FEATURES, HIDDEN, DROP]
