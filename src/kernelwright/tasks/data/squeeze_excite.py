"""cnn-block: a global mean gates the channels; bound by memory, read twice."""

import torch
from torch import nn

BATCH, CHANNELS, SQUEEZE, SIZE = 16, 64, 16, 56


class Model(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, channels: int, squeeze: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, squeeze)
        self.up = nn.Linear(squeeze, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.up(torch.relu(self.down(torch.mean(x, dim=(2, 3))))))
        return x * gate[:, :, None, None]


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIZE, SIZE)]


def get_init_inputs() -> list[int]:
    return [CHANNELS, SQUEEZE]
