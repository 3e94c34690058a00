"""rnn: input and state are copied together at every step; bound by launches."""

import torch
from torch import nn

STEPS, BATCH, FEATURES, HIDDEN = 48, 16, 128, 64
OUT_FEATURES = 32


class Model(nn.Module):
    """Recurrence over input and state side by side, projected at every step."""

    def __init__(self, steps: int, features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.steps = steps
        self.hidden = hidden
        self.cell = nn.Linear(features + hidden, hidden)
        self.head = nn.Linear(hidden, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], self.hidden)
        outputs = []
        for t in range(self.steps):
            state = torch.tanh(self.cell(torch.cat([x[t], state], dim=1)))
            outputs.append(self.head(state))
        return torch.stack(outputs)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(STEPS, BATCH, FEATURES)]


def get_init_inputs() -> list[int]:
    return [STEPS, FEATURES, HIDDEN, OUT_FEATURES]
