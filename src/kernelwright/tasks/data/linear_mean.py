"""gemm+reduce: every output of the product is averaged away; bound by compute."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES = 256, 1024, 256


class Model(nn.Module):
    """Linear layer less a learned shift, then the mean over its features."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.shift = nn.Parameter(torch.randn(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mean(self.linear(x) - self.shift, dim=1, keepdim=True)


def get_inputs() -> list[torch.Tensor]:
    return [4.0 * torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
