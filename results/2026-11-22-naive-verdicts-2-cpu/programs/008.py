# families/product-chain+dead-scores+clamps+sorted-max/512x512x64, written 1 times by contrastive-bucket local:base+self-supervised
# naive: accepted, 2.41x; judge: wrong-strides
# strides-differ: returned strides (64, 1); wanted (1, 1)
"""gemm: generated; three matrices multiplied in the costly order, row scores that nobody reads, clamped, scaled, clamped, scaled back, largest of each row, found by sorting."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 512, 64


class Model(nn.Module):
    """Three matrices multiplied in the costly order; row scores that nobody reads; clamped, scaled, clamped, scaled back; largest of each row, found by sorting."""

    def forward(self, a, b, c):
        y = (a @ b) @ c
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        y = torch.sort(y, dim=1)[0][:, -1:].clone()
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def forward(self, a, b, c):
        y = a @ (b @ c)
        y = torch.relu(y)
        y = torch.clamp(y, -1.5, 1.5)
        y = y * 2.0
        y = y * 0.5
        y = torch.sort(y, 1)[0]
        y = y[:, -1:]
        return y

