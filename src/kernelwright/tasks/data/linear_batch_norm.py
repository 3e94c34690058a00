"""gemm+norm: product and batch statistics; its bias is cancelled by the mean; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 512, 256, 256


class Model(nn.Module):
    """Linear layer, batch norm in training mode, ReLU."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.BatchNorm1d(out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
