# precision-downgrade on families/joined-linear+clamps+layer-norm/8192x1024x512, first in contrastive-random
# on input set `zero-one`: error 2.02e-05 rms, 2.01e-05 worst; allowed 9.22e-06 rms, 4.47e-05 worst
"""gemm+pointwise: generated; two linear layers of one input, joined, clamped, scaled, clamped, scaled back, layer normalisation spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 1024, 512


class Model(nn.Module):
    """Two linear layers of one input, joined; clamped, scaled, clamped, scaled back; layer normalisation spelt out."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, out // 2)
        self.right = nn.Linear(width, out // 2)

    def forward(self, x):
        y = torch.cat([self.left(x), self.right(x)], dim=1)
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):
    def forward(self, x):
        y = torch.cat([self.left(x), self.right(x)], dim=1)
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = y - torch.mean(y, dim=1, keepdim=True)
        v = torch.var(y, dim=1, correction=0, keepdim=True)
        y = y / torch.sqrt(v + 1e-5)
        return y

