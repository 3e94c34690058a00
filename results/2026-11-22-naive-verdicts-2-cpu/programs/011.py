# families/diagonal-right+dead-scores+leaky-where+sorted-max/64x512x512, written 1 times by held-out base:evolutionary
# naive: accepted, 1.30x; judge: wrong-strides
# strides-differ: returned strides (512, 1); wanted (1, 1)
"""gemm: generated; a matrix times a diagonal matrix, row scores that nobody reads, leaky ReLU by selection, largest of each row, found by sorting."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 64, 512, 512


class Model(nn.Module):
    """A matrix times a diagonal matrix; row scores that nobody reads; leaky ReLU by selection; largest of each row, found by sorting."""

    def forward(self, a, b):
        y = b @ torch.diag(a)
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = torch.where(y > 0, y, 0.01 * y)
        y = torch.sort(y, dim=1)[0][:, -1:].clone()
        return y


def get_inputs():
    return [torch.randn(OUT), torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b):
        y = a.unsqueeze(-2)
        y2 = y * b
        y = torch.relu(y2)
        y = y * (y > 0) + 0.01 * y * (y <= 0)
        y = torch.sort(y, 1)[0][:, -1:]
        return y

