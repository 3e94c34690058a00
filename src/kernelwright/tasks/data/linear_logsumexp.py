"""gemm+reduce: log-sum-exp of a product and an activation; bound by compute."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, IN_FEATURES, OUT_FEATURES = 256, 512, 512


class Model(nn.Module):
    """Linear layer, log-sum-exp over its features, then a leaky ReLU."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.logsumexp(2.0 * self.linear(x), dim=1, keepdim=True)
        return F.leaky_relu(x, negative_slope=0.01)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(BATCH, IN_FEATURES)]


def get_init_inputs() -> list[int]:
    return [IN_FEATURES, OUT_FEATURES]
