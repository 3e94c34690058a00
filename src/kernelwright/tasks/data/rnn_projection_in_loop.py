"""rnn: one small input product a step that does not depend on the state; bound by launches."""

import torch
from torch import nn

STEPS, BATCH, FEATURES, HIDDEN = 48, 16, 128, 64


class Model(nn.Module):
    """Elman recurrence; every state is returned."""

    def __init__(self, steps: int, features: int, hidden: int) -> None:
        super().__init__()
        self.steps = steps
        self.hidden = hidden
        self.input = nn.Linear(features, hidden)
        self.recur = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[1], self.hidden)
        states = []
        for t in range(self.steps):
            state = torch.tanh(self.input(x[t]) + self.recur(state))
            states.append(state)
        return torch.stack(states)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(STEPS, BATCH, FEATURES)]


def get_init_inputs() -> list[int]:
    return [STEPS, FEATURES, HIDDEN]
