"""scan: a first-order recurrence written as a loop; bound by launches."""

import torch
from torch import nn

STEPS, ROWS, COLUMNS = 64, 32, 128


class Model(nn.Module):
    """Exponential moving average over time with a learned rate per column."""

    def __init__(self, steps: int, columns: int) -> None:
        super().__init__()
        self.steps = steps
        self.rate = nn.Parameter(torch.randn(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.sigmoid(self.rate)
        state = x[0]
        averages = [state]
        for t in range(1, self.steps):
            state = keep * state + (1.0 - keep) * x[t]
            averages.append(state)
        return torch.stack(averages)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(STEPS, ROWS, COLUMNS)]


def get_init_inputs() -> list[int]:
    return [STEPS, COLUMNS]
