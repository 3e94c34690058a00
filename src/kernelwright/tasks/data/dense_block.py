"""cnn-block: every layer concatenates all earlier ones; bound by copies and passes."""

import torch
from torch import nn

BATCH, CHANNELS, GROWTH, SIZE, LAYERS = 2, 32, 16, 24, 3


class Model(nn.Module):
    """Densely connected layers in training mode."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + i * growth),
                nn.ReLU(),
                nn.Conv2d(channels + i * growth, growth, kernel_size=3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return x


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, GROWTH, LAYERS]
