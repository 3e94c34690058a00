# precision-downgrade on device-bound/transposed-twice+softsign+transposed-relu+affine-norm/32768x512x1024, first in self-supervised
# on input set `own`: error 6.78e-05 rms, 2.03e-04 worst; allowed 3.79e-06 rms, 2.61e-05 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""elementwise: generated; the input, transposed and back, softsign spelt out, ReLU on a transposed copy, transposed back, layer normalisation with weights spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 32768, 512, 1024


class Model(nn.Module):
    """The input, transposed and back; softsign spelt out; ReLU on a transposed copy, transposed back; layer normalisation with weights spelt out."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(out) + 0.5)
        self.shift = nn.Parameter(torch.randn(out))

    def forward(self, x):
        y = x.t().contiguous().t().contiguous()
        y = y / (1.0 + torch.abs(y))
        y = torch.relu(y.t().contiguous()).t().contiguous()
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
        y = x.clone()
        gate = torch.abs(y) + 1.0
        y = y / gate
        y = torch.relu(y)
        gate = torch.ones_like(y)
        gate[gate == 0.0] = 1e-5
        d = y - torch.mean(y, dim=1, keepdim=True)
        y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=1, keepdim=True) * gate)
        y = y * self.scale + self.shift
        return y

