# precision-downgrade on families/diagonal-left+affine-chain+no-ops+variance/512x256x256, first in contrastive-island
# on input set `own`: error 3.92e-03 rms, 3.25e-03 worst; allowed 5.31e-06 rms, 8.00e-06 worst
"""gemm: generated; a diagonal matrix times a matrix, four scalings and shifts, a chain of operators that change nothing, and ReLU twice, variance of each row spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 256, 256


class Model(nn.Module):
    """A diagonal matrix times a matrix; four scalings and shifts; a chain of operators that change nothing, and ReLU twice; variance of each row spelt out."""

    def forward(self, a, b):
        y = torch.diag(a) @ b
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        m = torch.mean(y, dim=1, keepdim=True)
        y = torch.mean(torch.pow(y - m, 2), dim=1)
        return y


def get_inputs():
    return [torch.randn(ROWS // 4), torch.randn(ROWS // 4, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b):
        y = torch.diag(a) @ b
        y = y * 2.0 - 4.0
        y = y + 2.0
        y = torch.relu(y)
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = torch.var(y, dim=1)
        return y

