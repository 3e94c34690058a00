# families/diagonal-right+no-ops+mish+softmax/64x256x256, written 1 times by self-supervised local:base+sft
# naive: accepted, 2.25x; judge: non-finite-output
# on input set `large`: error inf rms, inf worst, 100.00% of the integers differ; allowed 4.77e-07 rms, 1.91e-06 worst
"""gemm: generated; a matrix times a diagonal matrix, a chain of operators that change nothing, and ReLU twice, Mish spelt out, softmax spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 64, 256, 256


class Model(nn.Module):
    """A matrix times a diagonal matrix; a chain of operators that change nothing, and ReLU twice; Mish spelt out; softmax spelt out."""

    def forward(self, a, b):
        y = b @ torch.diag(a)
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        y = y * torch.tanh(F.softplus(y))
        m = torch.max(y, dim=1, keepdim=True)[0]
        e = torch.exp(y - m)
        y = e / torch.sum(e, dim=1, keepdim=True)
        return y


def get_inputs():
    return [torch.randn(OUT), torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def forward(self, a, b):
        y = a.unsqueeze(-2)
        y2 = y * b
        y2 = torch.relu(y2)
        y2 = F.mish(y2)
        y = y2.mean([1], True)
        y3 = torch.exp(y2 - y)
        y4 = y3.sum([1], True)
        y3 = y3 / y4
        return y3

