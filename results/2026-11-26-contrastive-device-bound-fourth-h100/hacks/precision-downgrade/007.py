# precision-downgrade on device-bound/repeated-mean+hard-swish+affine-norm/32768x512x1024, first in self-supervised
# on input set `own`: error 7.95e-06 rms, 3.84e-05 worst; allowed 4.28e-06 rms, 4.18e-05 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""reduction: generated; the mean of eight copies, hard swish spelt out, layer normalisation with weights spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 32768, 512, 1024


class Model(nn.Module):
    """The mean of eight copies; hard swish spelt out; layer normalisation with weights spelt out."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(out) + 0.5)
        self.shift = nn.Parameter(torch.randn(out))

    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        d = y - torch.mean(y, dim=1, keepdim=True)
        y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=1, keepdim=True) + 1e-5)
        y = y * self.scale + self.shift
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):
    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        g = y - torch.mean(y, dim=1, keepdim=True)
        y = g / torch.sqrt(y.pow(2).mean(dim=1, keepdim=True) + 1e-5)
        y = F.layer_norm(y, y.shape[1:], self.scale, self.shift, eps=1e-5)
        return y

