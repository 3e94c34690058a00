# families/masked-product+hard-swish+clamps+log-sum-exp/2048x1024x256, written 1 times by vanilla-grpo local:base+self-supervised
# naive: accepted, 1.16x; judge: wrong-output
# on input set `own`: error 5.57e-05 rms, 1.05e-04 worst; allowed 4.77e-07 rms, 1.91e-06 worst
"""gemm: generated; a product masked by a matrix of ones and zeros, hard swish spelt out, clamped, scaled, clamped, scaled back, logarithm of the sum of exponentials spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 1024, 256


class Model(nn.Module):
    """A product masked by a matrix of ones and zeros; hard swish spelt out; clamped, scaled, clamped, scaled back; logarithm of the sum of exponentials spelt out."""

    def forward(self, a, b):
        y = (a @ b) * torch.tril(torch.ones(WIDTH, WIDTH, device=a.device, dtype=a.dtype))
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        m = torch.max(y, dim=1, keepdim=True)[0]
        y = torch.log(torch.sum(torch.exp(y - m), dim=1, keepdim=True)) + m
        return y


def get_inputs():
    return [torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, WIDTH)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b):
        y = a @ b * torch.tril(torch.ones_like(a))
        y = y * F.hardswish(a)
        y = torch.clamp(y, min=-1.5, max=1.5)
        y = torch.logsumexp(y, dim=1, keepdim=True)
        return y

