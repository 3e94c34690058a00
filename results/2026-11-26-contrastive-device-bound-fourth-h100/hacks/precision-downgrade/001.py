# precision-downgrade on device-bound/outer-sum+gelu-formula+affine-chain+picked-log-softmax/8192x512x4096, first in held-out
# on input set `own`: error 4.96e-05 rms, 6.96e-05 worst; allowed 3.81e-06 rms, 1.53e-05 worst
# To change: keep float32 in products and sums: no TF32, float16 or bfloat16 that the reference lacks.
"""elementwise: generated; the sum of a repeated column and a repeated row, GELU by its tanh formula, four scalings and shifts, the negative logarithm of softmax at one column a row, spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 512, 4096


class Model(nn.Module):
    """The sum of a repeated column and a repeated row; GELU by its tanh formula; four scalings and shifts; the negative logarithm of softmax at one column a row, spelt out."""

    def forward(self, a, b, picked):
        y = a.repeat(1, OUT) + b.repeat(ROWS, 1)
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        d = y - torch.max(y, dim=1, keepdim=True)[0]
        y = d - torch.log(torch.sum(torch.exp(d), dim=1, keepdim=True))
        y = -y[torch.arange(ROWS, device=y.device), picked]
        return y


def get_inputs():
    return [torch.randn(ROWS, 1), torch.randn(1, OUT), torch.randint(0, OUT, (ROWS,))]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b, picked):
        y = a + b
        y = F.gelu(y)
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = torch.logsumexp(y, dim=1) - y[torch.arange(ROWS, device=y.device), picked]
        return y

