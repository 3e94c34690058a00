"""mlp: two linear layers with a narrow output and nothing between; bound by compute."""

import torch
from torch import nn

BATCH, FEATURES, HIDDEN, OUT_FEATURES = 512, 128, 1024, 32


class Model(nn.Module):
    """Two linear layers in a row."""

    def __init__(self, features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.wide = nn.Linear(features, hidden)
        self.narrow = nn.Linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN, OUT_FEATURES]
