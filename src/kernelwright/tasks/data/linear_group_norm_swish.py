"""gemm+norm: product, group norm and activation; bound by compute and passes."""

import torch
from torch import nn

BATCH, IN_FEATURES, OUT_FEATURES, GROUPS = 512, 128, 512, 16


class Model(nn.Module):
    """Linear layer, group norm, swish."""

    def __init__(self, in_features: int, out_features: int, groups: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(groups, out_features)
        nn.init.normal_(self.norm.weight, 1.0, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        return torch.sigmoid(x) * x


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES, GROUPS]
