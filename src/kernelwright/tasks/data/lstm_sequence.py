"""rnn: one layer, every step is read; bound by launches and small products."""

import torch
from torch import nn

BATCH, STEPS, FEATURES, HIDDEN, OUT_FEATURES = 8, 96, 64, 96, 32


class Model(nn.Module):
    """Long short-term memory, projected at every step."""

    def __init__(self, features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(x)
        return self.head(outputs)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, STEPS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN, OUT_FEATURES]
