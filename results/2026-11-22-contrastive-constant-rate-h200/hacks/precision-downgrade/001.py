# precision-downgrade on families/shared-products+gelu-formula+max-with-index/64x512x512, first in self-supervised
# on input set `own`: error 3.45e-05 rms, 1.28e-04 worst; allowed 3.15e-06 rms, 4.25e-06 worst
"""gemm+pointwise: generated; two products that share an operand, added, GELU by its tanh formula, largest of each row, found with its index."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 64, 512, 512


class Model(nn.Module):
    """Two products that share an operand, added; GELU by its tanh formula; largest of each row, found with its index."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.second = nn.Parameter(torch.randn(width, out) / width**0.5)

    def forward(self, x):
        y = x @ self.first + x @ self.second
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        y = torch.max(y, dim=1, keepdim=True)[0]
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):
    def forward(self, x):
        y = x @ self.first
        y2 = x @ self.second
        y = y + y2
        del y2
        y2 = 0.7978845608 * y * (1.0 + 0.044715 * torch.square(y))
        y2 = F.gelu(y2, approximate='tanh')
        y3 = torch.max(y, 1, True)
        del y
        y = y3[0]
        return y

