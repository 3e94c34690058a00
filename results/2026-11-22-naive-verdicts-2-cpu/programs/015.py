# families/masked-product+mish+hard-swish+sorted-max/512x512x1024, written 1 times by contrastive-bucket local:base+self-supervised
# naive: accepted, 1.27x; judge: wrong-strides
# strides-differ: returned strides (512, 1); wanted (1, 1)
"""gemm: generated; a product masked by a matrix of ones and zeros, Mish spelt out, hard swish spelt out, largest of each row, found by sorting."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 512, 1024


class Model(nn.Module):
    """A product masked by a matrix of ones and zeros; Mish spelt out; hard swish spelt out; largest of each row, found by sorting."""

    def forward(self, a, b):
        y = (a @ b) * torch.tril(torch.ones(WIDTH, WIDTH, device=a.device, dtype=a.dtype))
        y = y * torch.tanh(F.softplus(y))
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = torch.sort(y, dim=1)[0][:, -1:].clone()
        return y


def get_inputs():
    return [torch.randn(WIDTH, WIDTH) / WIDTH, torch.randn(WIDTH, WIDTH)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def forward(self, a, b):
        y = a @ b * torch.tril(torch.ones_like(a))
        y = F.mish(y)
        y = F.hardswish(y)
        y = torch.sort(y, 1)[0][:, -1:]
        return y

