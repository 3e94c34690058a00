# families/one-hot+silu+affine-chain+layer-norm/64x1024x512, written 1 times by self-supervised local:base+sft
# naive: accepted, 8.99x; judge: wrong-output
# on input set `zero-one`: error 7.04e-06 rms, 3.80e-06 worst; allowed 1.31e-06 rms, 1.91e-06 worst
"""gemm: generated; rows of a table picked by a product with one-hot rows, SiLU spelt out, four scalings and shifts, layer normalisation spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 64, 1024, 512


class Model(nn.Module):
    """Rows of a table picked by a product with one-hot rows; SiLU spelt out; four scalings and shifts; layer normalisation spelt out."""

    def forward(self, index, table):
        y = F.one_hot(index, WIDTH).to(table.dtype) @ table
        y = y / (1.0 + torch.exp(-y))
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)
        return y


def get_inputs():
    return [torch.randint(0, WIDTH, (ROWS,)), torch.randn(WIDTH, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, index, table):
        y = table[index]
        y = F.silu(y)
        y = (y * 2.0 - 2.0) * 2.0 + 2.0
        y = y - torch.mean(y, dim=1, keepdim=True)
        y = y / torch.sqrt(torch.mean(y * y, dim=1, keepdim=True) + 1e-5)
        return y

