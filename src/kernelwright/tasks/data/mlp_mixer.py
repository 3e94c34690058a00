"""network: perceptrons over tokens and over features in turn; bound by compute and transposes."""

import torch
from torch import nn

BATCH, TOKENS, FEATURES, HIDDEN = 8, 64, 128, 128


class Model(nn.Module):
    """One mixer layer with layer norms and residuals."""

    def __init__(self, tokens: int, features: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.across_tokens = nn.Sequential(
            nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens)
        )
        self.norm2 = nn.LayerNorm(features)
        self.across_features = nn.Sequential(
            nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_features(self.norm2(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, TOKENS, FEATURES)]


def get_init_inputs() -> list[int]:
    return [TOKENS, FEATURES, HIDDEN]
