# precision-downgrade on device-bound/linear+no-ops+group-norm/32768x512x1024, first in held-out
# on input set `own`: error 3.24e-05 rms, 7.17e-05 worst; allowed 1.32e-05 rms, 1.07e-04 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""gemm+pointwise: generated; a linear layer, a chain of operators that change nothing, and ReLU twice, normalised over each of eight groups of columns, spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 32768, 512, 1024


class Model(nn.Module):
    """A linear layer; a chain of operators that change nothing, and ReLU twice; normalised over each of eight groups of columns, spelt out."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        y = self.linear(x)
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        g = y.view(ROWS, 8, OUT // 8)
        d = g - torch.mean(g, dim=2, keepdim=True)
        y = (d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=2, keepdim=True) + 1e-5)).view(ROWS, OUT)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):
    def forward(self, x):
        y = self.linear(x)
        y = torch.relu(y * 1.0 + y)
        g = y.view(ROWS, 8, OUT // 8)
        d = g - torch.mean(g, dim=2, keepdim=True)
        y = (d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=2, keepdim=True) + 1e-5)).view(ROWS, OUT)
        return y

