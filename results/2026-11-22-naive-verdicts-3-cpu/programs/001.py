# families/diagonal-right+no-ops+mish+softmax/64x256x256, written 2 times by vanilla-grpo local:base+self-supervised
# naive: accepted, 10.89x; judge: wrong-output
# on input set `own`: error 3.16e-02 rms, 4.67e-02 worst; allowed 1.28e-05 rms, 2.89e-05 worst
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
        y = a.unsqueeze(0) * b
        y = torch.relu(y)
        y = F.softmax(y, dim=1)
        return y

