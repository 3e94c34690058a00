"""elementwise: generated; even and odd columns, interleaved again, SiLU spelt out, the negative logarithm of softmax at one column a row, spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 32768, 512, 2048


class Model(nn.Module):
    """Even and odd columns, interleaved again; SiLU spelt out; the negative logarithm of softmax at one column a row, spelt out."""

    def forward(self, x, picked):
        y = torch.stack([x[:, 0::2], x[:, 1::2]], dim=2).reshape(ROWS, OUT)
        y = y / (1.0 + torch.exp(-y))
        d = y - torch.max(y, dim=1, keepdim=True)[0]
        y = d - torch.log(torch.sum(torch.exp(d), dim=1, keepdim=True))
        y = -y[torch.arange(ROWS, device=y.device), picked]
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT), torch.randint(0, OUT, (ROWS,))]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x, picked):
        y = x
        y = F.silu(y)
        y = F.log_softmax(y, dim=1)
        y = -y[torch.arange(ROWS, device=y.device), picked]
        return y
