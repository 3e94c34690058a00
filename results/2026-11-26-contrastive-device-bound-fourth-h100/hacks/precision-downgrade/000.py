# precision-downgrade on device-bound/low-rank+hard-swish+shifted-softmax/16384x1024x2048, first in contrastive-bucket
# on input set `large`: error 1.10e-02 rms, 4.52e+01 worst; allowed 2.70e-06 rms, 1.08e-05 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""gemm: generated; the input times a matrix of rank 32, hard swish spelt out, shifted by row and put through softmax spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 16384, 1024, 2048


class Model(nn.Module):
    """The input times a matrix of rank 32; hard swish spelt out; shifted by row and put through softmax spelt out."""

    def forward(self, x, u, v):
        y = x @ (u @ v)
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = y + torch.mean(y, dim=1, keepdim=True)
        d = y - torch.max(y, dim=1, keepdim=True)[0]
        y = torch.exp(d)
        y = y / torch.sum(y, dim=1, keepdim=True)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, 32), torch.randn(32, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x, u, v):
        y = x @ u @ v
        y = F.hardswish(y)
        y = torch.softmax(y, dim=1)
        return y

