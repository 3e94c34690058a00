"""gemm+reduce: groups of eight outputs are averaged; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 256, 512, 1024
POOL = 8


class Model(nn.Module):
    """Linear layer, then average pooling over its features."""

    def __init__(self, in_features: int, out_features: int, pool: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.pool = nn.AvgPool1d(kernel_size=pool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.pool(self.linear(x).unsqueeze(1)).squeeze(1))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES, POOL]
