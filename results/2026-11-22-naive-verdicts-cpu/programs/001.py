# families/diagonal-left+groups-in-loop+leaky-where+variance/8192x512x1024, written 1 times by held-out base:sft
# naive: accepted, 2.22x; judge: non-finite-output
# on input set `own`: error inf rms, inf worst, 100.00% of the integers differ; allowed 5.57e-06 rms, 1.14e-05 worst
"""gemm: generated; a diagonal matrix times a matrix, ReLU and square, column group by column group, leaky ReLU by selection, variance of each row spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 512, 1024


class Model(nn.Module):
    """A diagonal matrix times a matrix; ReLU and square, column group by column group; leaky ReLU by selection; variance of each row spelt out."""

    def forward(self, a, b):
        y = torch.diag(a) @ b
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = torch.where(y > 0, y, 0.01 * y)
        m = torch.mean(y, dim=1, keepdim=True)
        y = torch.mean(torch.pow(y - m, 2), dim=1)
        return y


def get_inputs():
    return [torch.randn(ROWS // 4), torch.randn(ROWS // 4, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def forward(self, a, b):
        y = torch.diag(a)
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = torch.where(y > 0, y, 0.01 * y)
        y = torch.mean(y, dim=1, keepdim=True)
        y = torch.var(y, dim=1)
        return y

