# families/product-chain+no-ops+groups-in-loop+layer-norm/8192x256x64, written 1 times by self-supervised local:base+sft
# naive: accepted, 4.18x; judge: non-finite-output
# on input set `large`: error inf rms, inf worst, 100.00% of the integers differ; allowed 1.60e+01 rms, 1.42e+01 worst
"""gemm: generated; three matrices multiplied in the costly order, a chain of operators that change nothing, and ReLU twice, ReLU and square, column group by column group, layer normalisation spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 8192, 256, 64


class Model(nn.Module):
    """Three matrices multiplied in the costly order; a chain of operators that change nothing, and ReLU twice; ReLU and square, column group by column group; layer normalisation spelt out."""

    def forward(self, a, b, c):
        y = (a @ b) @ c
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(WIDTH, 2 * WIDTH), torch.randn(2 * WIDTH, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b, c):
        y = a @ (b @ c)
        y = y * 1.0
        y = torch.relu(y + 0.0)
        y = torch.relu(y.clone())
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(2, dim=1)], dim=1)
        y = F.layer_norm(y, [64], None, None, eps=1e-5)
        return y

