"""mlp: three linear layers with ReLU between; bound by compute."""

import torch
from torch import nn

BATCH, FEATURES, HIDDEN, CLASSES = 256, 256, 512, 64


class Model(nn.Module):
    """Multi-layer perceptron."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN, CLASSES]
