# families/product-chain+no-ops+dead-scores+unit-length/512x256x64, written 1 times by contrastive-bucket local:base+self-supervised
# naive: accepted, 5.68x; judge: wrong-output
# on input set `small`: error 1.00e+00 rms, 8.55e-01 worst; allowed 1.11e-05 rms, 6.29e-05 worst
"""gemm: generated; three matrices multiplied in the costly order, a chain of operators that change nothing, and ReLU twice, row scores that nobody reads, scaled to unit length."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 256, 64


class Model(nn.Module):
    """Three matrices multiplied in the costly order; a chain of operators that change nothing, and ReLU twice; row scores that nobody reads; scaled to unit length."""

    def forward(self, a, b, c):
        y = (a @ b) @ c
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = y / torch.clamp(torch.sqrt(torch.sum(y * y, dim=1, keepdim=True)), min=1e-12)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b, c):
        y = a @ (b @ c)
        y = torch.relu(y * 2)
        y = y / torch.sqrt(torch.sum(torch.square(y), dim=1, keepdim=True).clamp(min=1e-12))
        return y

