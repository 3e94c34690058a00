# precision-downgrade on device-bound/outer-sum+clamps+batch-norm/16384x512x4096, first in self-supervised
# on input set `own`: error 5.06e-05 rms, 2.03e-03 worst; allowed 7.63e-06 rms, 2.71e-04 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""elementwise: generated; the sum of a repeated column and a repeated row, clamped, scaled, clamped, scaled back, normalised over the rows, spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 16384, 512, 4096


class Model(nn.Module):
    """The sum of a repeated column and a repeated row; clamped, scaled, clamped, scaled back; normalised over the rows, spelt out."""

    def forward(self, a, b):
        y = a.repeat(1, OUT) + b.repeat(ROWS, 1)
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        d = y - torch.mean(y, dim=0)
        y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=0) + 1e-5)
        return y


def get_inputs():
    return [torch.randn(ROWS, 1), torch.randn(1, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b):
        y = a.repeat(1, OUT) + b.repeat(ROWS, 1)
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        y = y * 2.0
        d = y - torch.mean(y, dim=0)
        y = d / torch.sqrt(torch.mean(torch.pow(d, 2), dim=0) + 1e-5)
        return y

