"""network: stem, two residual stages and a classifier in training mode; bound by compute and launches."""

import torch
from torch import nn

BATCH, WIDTH, CLASSES, SIZE = 8, 16, 10, 24


class Model(nn.Module):
    """Small residual network of colour images."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stage1 = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.stage2 = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
        )
        self.shortcut = nn.Conv2d(width, 2 * width, 1, stride=2, bias=False)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.stage1(x))
        x = torch.relu(self.shortcut(x) + self.stage2(x))
        return self.head(x.mean(dim=(2, 3)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, 3, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [WIDTH, CLASSES]
