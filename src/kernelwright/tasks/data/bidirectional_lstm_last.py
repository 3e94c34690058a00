"""rnn: both directions run in full although only the last step is read; bound by launches."""

import torch
from torch import nn

BATCH, STEPS, FEATURES, HIDDEN = 8, 48, 64, 64


class Model(nn.Module):
    """Last output of a bidirectional LSTM."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(x)
        return outputs[:, -1]


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, STEPS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN]
