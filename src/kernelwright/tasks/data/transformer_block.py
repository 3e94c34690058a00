"""network: causal attention and a GELU perceptron with pre-norms; bound by compute and passes."""

import math

import torch
from torch import nn

BATCH, TOKENS, FEATURES, HEADS = 2, 128, 128, 4


class Model(nn.Module):
    """One block of a small language model."""

    def __init__(self, tokens: int, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        later = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), diagonal=1)
        self.register_buffer("later", later, persistent=False)
        self.norm1 = nn.LayerNorm(features)
        self.project = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)
        self.norm2 = nn.LayerNorm(features)
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, features = x.shape
        qkv = self.project(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = torch.softmax(scores.masked_fill(self.later, float("-inf")), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, features))
        y = self.up(self.norm2(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.down(y)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, TOKENS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [TOKENS, FEATURES, HEADS]
