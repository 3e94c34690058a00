"""state-space: an input-dependent recurrence written as a loop; bound by launches."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, STEPS, FEATURES, STATE = 2, 48, 64, 16


class Model(nn.Module):
    """Selective state-space layer."""

    def __init__(self, steps: int, features: int, state: int) -> None:
        super().__init__()
        self.steps = steps
        self.log_decay = nn.Parameter(torch.log(torch.rand(features, state) + 0.5))
        self.skip = nn.Parameter(torch.randn(features))
        self.to_rate = nn.Linear(features, features)
        self.to_input = nn.Linear(features, state, bias=False)
        self.to_output = nn.Linear(features, state, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = F.softplus(self.to_rate(x))
        entering = self.to_input(x)
        leaving = self.to_output(x)
        decay = -torch.exp(self.log_decay)
        state = x.new_zeros(x.shape[0], decay.shape[0], decay.shape[1])
        outputs = []
        for t in range(self.steps):
            step = rate[:, t].unsqueeze(-1)
            entry = entering[:, t].unsqueeze(1) * x[:, t].unsqueeze(-1)
            state = torch.exp(step * decay) * state + step * entry
            outputs.append(torch.sum(state * leaving[:, t].unsqueeze(1), dim=-1))
        return torch.stack(outputs, dim=1) + self.skip * x


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, STEPS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [STEPS, FEATURES, STATE]
