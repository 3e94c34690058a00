# families/product-chain+dead-scores+max-with-index/512x1024x64, written 1 times by held-out base:evolutionary
# naive: accepted, 6.83x; judge: wrong-shape
# returned shape (512, 64); wanted (512, 1)
"""gemm: generated; three matrices multiplied in the costly order, row scores that nobody reads, largest of each row, found with its index."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 1024, 64


class Model(nn.Module):
    """Three matrices multiplied in the costly order; row scores that nobody reads; largest of each row, found with its index."""

    def forward(self, a, b, c):
        y = (a @ b) @ c
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = torch.max(y, dim=1, keepdim=True)[0]
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b, c):
        y = a @ (b @ c)
        y = torch.relu(y)
        y2 = torch.max(y, dim=1)[0].unsqueeze(1)
        y = torch.where(y > y2, y, y2)
        return y

