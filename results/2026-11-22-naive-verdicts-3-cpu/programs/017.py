# families/repeated-mean+groups-in-loop+affine-chain+rms-norm/8192x256x512, written 1 times by held-out base:sft
# naive: accepted, 1.21x; judge: non-finite-output
# on input set `own`: error inf rms, inf worst, 100.00% of the integers differ; allowed 4.64e-06 rms, 1.32e-05 worst
"""reduction: generated; the mean of eight copies, ReLU and square, column group by column group, four scalings and shifts, divided by its root mean square."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 256, 512


class Model(nn.Module):
    """The mean of eight copies; ReLU and square, column group by column group; four scalings and shifts; divided by its root mean square."""

    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = y / torch.sqrt(torch.mean(torch.pow(y, 2), dim=1, keepdim=True) + 1e-5)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = torch.relu(y) ** 2
        y = y * 2.0 - 2.0
        y2 = y.mean([1], True)
        y3 = y2 + 1e-05
        y = y / torch.sqrt(y3)
        return y

