"""rnn: two layers, only the last step is read; bound by launches and small products."""

import torch
from torch import nn

BATCH, STEPS, FEATURES, HIDDEN, LAYERS = 8, 32, 64, 64, 2


class Model(nn.Module):
    """Last output of a gated recurrent network."""

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.gru(x)
        return outputs[:, -1]


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, STEPS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN, LAYERS]
