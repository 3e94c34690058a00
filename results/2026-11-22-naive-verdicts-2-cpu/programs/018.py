# families/product-chain+gelu-formula+transposed-relu+scanned-sum/2048x512x64, written 1 times by held-out base:evolutionary
# naive: accepted, 8.45x; judge: wrong-strides
# strides-differ: returned strides (64, 1); wanted (1, 1)
"""gemm: generated; three matrices multiplied in the costly order, GELU by its tanh formula, ReLU on a transposed copy, transposed back, summed by way of a running sum."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 512, 64


class Model(nn.Module):
    """Three matrices multiplied in the costly order; GELU by its tanh formula; ReLU on a transposed copy, transposed back; summed by way of a running sum."""

    def forward(self, a, b, c):
        y = (a @ b) @ c
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        y = torch.relu(y.t().contiguous()).t().contiguous()
        y = torch.cumsum(y, dim=1)[:, -1:].clone()
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b, c):
        y = a @ (b @ c)
        u = 0.7978845608 * y * (1.0 + 0.044715 * torch.square(y))
        y = 0.5 * y * (torch.tanh(u) + 1.0)
        y = torch.relu(y).t().contiguous().t().contiguous()
        y = torch.cumsum(y, 1)[:, -1:]
        return y

