"""mlp: two products of one input, gated, and a third; bound by compute."""

import torch
from torch import nn

TOKENS, FEATURES, HIDDEN = 128, 256, 512


class Model(nn.Module):
    """Gated perceptron of a language model."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


def get_inputs() -> list[torch.Tensor]:
    return [2.0 * torch.randn(TOKENS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HIDDEN]
