"""attention: half of the stored scores is masked away; bound by memory and compute."""

import math

import torch
from torch import nn

BATCH, TOKENS, FEATURES, HEADS = 2, 192, 128, 4


class Model(nn.Module):
    """Causal self-attention with its projections."""

    def __init__(self, tokens: int, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
        self.register_buffer("later", later, persistent=False)
        self.project = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, features = x.shape
        q, k, v = self.project(x).split(features, dim=2)
        q = q.view(batch, tokens, self.heads, -1).transpose(1, 2)
        k = k.view(batch, tokens, self.heads, -1).transpose(1, 2)
        v = v.view(batch, tokens, self.heads, -1).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = torch.softmax(scores.masked_fill(self.later, float("-inf")), dim=-1)
        y = (weights @ v).transpose(1, 2).reshape(batch, tokens, features)
        return self.out(y)


def get_inputs() -> list[torch.Tensor]:
    return [2.0 * torch.randn(BATCH, TOKENS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [TOKENS, FEATURES, HEADS]
