# families/input+hard-swish+silu+layer-norm/8192x1024x256, written 1 times by self-supervised local:base+sft
# naive: accepted, 1.96x; judge: non-finite-output
# on input set `own`: error inf rms, inf worst, 100.00% of the integers differ; allowed 5.65e-06 rms, 1.53e-05 worst
"""elementwise: generated; the input, hard swish spelt out, SiLU spelt out, layer normalisation spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 1024, 256


class Model(nn.Module):
    """The input; hard swish spelt out; SiLU spelt out; layer normalisation spelt out."""

    def forward(self, x):
        y = x
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = y / (1.0 + torch.exp(-y))
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        y = x
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = y * torch.asin(torch.reciprocal(torch.sqrt(torch.mean(torch.square(y), dim=1, keepdim=True) + 1e-5)))
        return y

