# families/diagonal-right+no-ops+mish+softmax/64x256x256, written 2 times by contrastive-bucket local:base+self-supervised
# naive: accepted, 14.25x; judge: wrong-output
# on input set `own`: error 2.86e-02 rms, 4.91e-02 worst; allowed 1.10e-05 rms, 2.94e-05 worst
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
        y = b * a
        y = torch.relu(y)
        y = torch.softmax(y, dim=1)
        return y

