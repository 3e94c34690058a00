# families/repeated-mean+groups-in-loop+softmax/512x1024x1024, written 1 times by self-supervised local:base+sft
# naive: accepted, 1.57x; judge: non-finite-output
# on input set `large`: error inf rms, inf worst, 100.00% of the integers differ; allowed 4.77e-07 rms, 1.91e-06 worst
"""reduction: generated; the mean of eight copies, ReLU and square, column group by column group, softmax spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 1024, 1024


class Model(nn.Module):
    """The mean of eight copies; ReLU and square, column group by column group; softmax spelt out."""

    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        m = torch.max(y, dim=1, keepdim=True)[0]
        e = torch.exp(y - m)
        y = e / torch.sum(e, dim=1, keepdim=True)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = torch.exp(y - torch.mean(y, dim=1, keepdim=True))
        y = y / torch.sum(y, dim=1, keepdim=True)
        return y

