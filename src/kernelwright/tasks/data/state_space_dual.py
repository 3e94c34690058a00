"""state-space: a decaying lower-triangular matrix is stored per head; bound by memory."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, HEADS, STEPS, FEATURES, STATE = 2, 4, 192, 32, 16


class Model(nn.Module):
    """State-space layer in its attention-like form."""

    def __init__(self, heads: int, steps: int) -> None:
        super().__init__()
        later = torch.triu(torch.ones(steps, steps, dtype=torch.bool), diagonal=1)
        self.register_buffer("later", later, persistent=False)
        self.rate = nn.Parameter(torch.rand(heads) + 0.1)

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        log_decay = -F.softplus(a) * self.rate[None, :, None]
        total = torch.cumsum(log_decay, dim=-1)
        between = total.unsqueeze(-1) - total.unsqueeze(-2)
        decay = torch.exp(between.masked_fill(self.later, float("-inf")))
        return torch.matmul(torch.matmul(c, b.transpose(-2, -1)) * decay, x)


def get_inputs() -> list[torch.Tensor]:
    return [
        torch.randn(BATCH, HEADS, STEPS, FEATURES),
        torch.randn(BATCH, HEADS, STEPS),
        torch.randn(BATCH, HEADS, STEPS, STATE),
        torch.randn(BATCH, HEADS, STEPS, STATE),
    ]


def get_init_inputs() -> list[int]:
    return [HEADS, STEPS]
