"""gemm+pointwise: three products of one input are added; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 256, 256, 256


class Model(nn.Module):
    """Sum of three linear layers of the same input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, out_features)
        self.second = nn.Linear(in_features, out_features)
        self.third = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) + self.third(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
