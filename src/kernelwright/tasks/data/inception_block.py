"""cnn-block: four branches of one input copied together; bound by passes and a copy."""

import torch
from torch import nn

BATCH, CHANNELS, BRANCH, SIZE = 2, 48, 16, 32


class Model(nn.Module):
    """Parallel convolutions and a pooling side by side."""

    def __init__(self, channels: int, branch: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, branch, kernel_size=1)
        self.reduce3 = nn.Conv2d(channels, branch, kernel_size=1)
        self.three = nn.Conv2d(branch, branch, kernel_size=3, padding=1)
        self.reduce5 = nn.Conv2d(channels, branch, kernel_size=1)
        self.five = nn.Conv2d(branch, branch, kernel_size=5, padding=2)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)
        self.after_pool = nn.Conv2d(channels, branch, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [
            self.one(x),
            self.three(self.reduce3(x)),
            self.five(self.reduce5(x)),
            self.after_pool(self.pool(x)),
        ]
        return torch.cat(branches, dim=1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, BRANCH]
