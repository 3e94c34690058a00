# precision-downgrade on device-bound/linear+no-ops+column-softmax/32768x512x1024, first in self-supervised
# on input set `own`: error 1.22e-04 rms, 2.27e-04 worst; allowed 1.08e-05 rms, 5.94e-05 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""gemm+pointwise: generated; a linear layer, a chain of operators that change nothing, and ReLU twice, softmax over the rows by way of a transposed copy."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 32768, 512, 1024


class Model(nn.Module):
    """A linear layer; a chain of operators that change nothing, and ReLU twice; softmax over the rows by way of a transposed copy."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        y = self.linear(x)
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        y = torch.softmax(y.t().contiguous(), dim=1).t().contiguous()
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):
    def forward(self, x):
        y = self.linear(x)
        y = y * 1.0
        y = F.relu(y + 0.0)
        y = F.relu(y.clone())
        y = F.softmax(y, dim=0)
        return y

