# precision-downgrade on device-bound/permuted-blocks+affine-chain+softsign+variance/16384x512x2048, first in self-supervised
# on input set `small`: error 6.92e-05 rms, 1.52e-04 worst; allowed 6.41e-05 rms, 5.73e-04 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""elementwise: generated; groups of eight rows, permuted and back, four scalings and shifts, softsign spelt out, variance of each row spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 16384, 512, 2048


class Model(nn.Module):
    """Groups of eight rows, permuted and back; four scalings and shifts; softsign spelt out; variance of each row spelt out."""

    def forward(self, x):
        y = x.view(-1, 8, OUT).permute(1, 0, 2).contiguous()
        y = y.permute(1, 0, 2).reshape(ROWS, OUT)
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = y / (1.0 + torch.abs(y))
        m = torch.mean(y, dim=1, keepdim=True)
        y = torch.mean(torch.pow(y - m, 2), dim=1)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        y = x.clone()
        y = (y - 2.0) * 2.0 + 2.0
        y = y * torch.reciprocal(torch.abs(y) + 1.0)
        y = torch.var(y, dim=1, correction=0)
        return y

