# precision-downgrade on families/columns-reversed+mish+softmax/8192x256x256, first in contrastive-island
# on input set `large`: error 2.35e-05 rms, 4.48e-04 worst; allowed 1.18e-05 rms, 7.96e-04 worst
"""elementwise: generated; columns stacked one by one in reverse, Mish spelt out, softmax spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 256, 256


class Model(nn.Module):
    """Columns stacked one by one in reverse; Mish spelt out; softmax spelt out."""

    def forward(self, x):
        y = torch.stack([x[:, -1 - i] for i in range(OUT)], dim=1)
        y = y * torch.tanh(F.softplus(y))
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
        y = torch.flip(x, dims=[1])
        gate = torch.tanh(F.softplus(y))
        y = gate.mul(y)
        y = torch.exp(y - torch.logsumexp(y, dim=1, keepdim=True))
        return y

