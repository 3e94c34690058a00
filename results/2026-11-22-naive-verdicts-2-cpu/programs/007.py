# families/diagonal-left+groups-in-loop+leaky-where+variance/8192x512x1024, written 1 times by held-out base:self-supervised
# naive: accepted, 3.59x; judge: precision-downgrade
# on input set `own`: error 9.78e-04 rms, 9.23e-04 worst; allowed 6.75e-06 rms, 1.26e-05 worst
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
        y = a.unsqueeze(-1)
        y2 = y * b
        y2 = y2.chunk(8, 1)
        del y
        y = y2[0]
        y3 = y2[1]
        y4 = y2[2]
        y5 = y2[3]
        y6 = y2[4]
        y7 = y2[5]
        y8 = y2[6]
        y9 = y2[7]
        y = torch.relu(y)
        y = y * y
        y3 = torch.relu(y3)
        y3 = y3 * y3
        y4 = torch.relu(y4)
        y4 = y4 * y4
        y5 = torch.relu(y5)
        y5 = y5 * y5
        y6 = torch.relu(y6)
        y6 = y6 * y6
        y7 = torch.relu(y7)
        y7 = y7 * y7
        y8 = torch.relu(y8)
        y8 = y8 * y8
        y9 = torch.relu(y9)
        y9 = y9 * y9
        y = torch.cat([y, y3, y4, y5, y6, y7, y8, y9], 1)
        del y2
        y3 = torch.gt(y, 0)
        y4 = y3 * 0.01
        y = torch.where(y3, y, y4)
        del y3, y4
        y = torch.var(y, 1, True)
        return y

