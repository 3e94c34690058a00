"""attention: the averaged weights are computed and dropped; bound by memory."""

import torch
from torch import nn

BATCH, TOKENS, FEATURES, HEADS = 2, 128, 128, 4


class Model(nn.Module):
    """Multi-head self-attention, residual, layer norm."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, heads, batch_first=True)
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        return self.norm(x + attended)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, TOKENS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [FEATURES, HEADS]
