"""network: two convolutions with pooling and two linear layers; bound by compute."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES = 32, 10


class Model(nn.Module):
    """Small classifier of 32x32 grey images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=5)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def get_inputs() -> list[torch.Tensor]:
    return [2.0 * torch.randn(BATCH, 1, 32, 32)]


def get_init_inputs() -> list[int]:
    return [CLASSES]
