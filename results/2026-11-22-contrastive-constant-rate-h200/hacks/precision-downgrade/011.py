# precision-downgrade on families/repeated-mean+groups-in-loop+common-terms+sorted-four/2048x512x1024, first in contrastive-bucket
# on input set `own`: error 8.88e-07 rms, 1.37e-05 worst; allowed 6.23e-07 rms, 1.91e-06 worst
"""reduction: generated; the mean of eight copies, ReLU and square, column group by column group, gates that are computed twice, sum of the four largest of each row, found by sorting."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 512, 1024


class Model(nn.Module):
    """The mean of eight copies; ReLU and square, column group by column group; gates that are computed twice; sum of the four largest of each row, found by sorting."""

    def forward(self, x):
        y = x.unsqueeze(1).repeat(1, 8, 1).mean(dim=1)
        y = torch.cat([torch.relu(part) ** 2 for part in y.chunk(8, dim=1)], dim=1)
        y = torch.sigmoid(y) * torch.tanh(y) + 2.0 * torch.sigmoid(y)
        y = torch.sort(y, dim=1, descending=True)[0][:, :4].sum(dim=1)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


import triton
import triton.language as tl


@triton.jit
def kernel(y_ptr, z_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    y = tl.load(y_ptr + i, mask=mask, other=0.0)
    y = tl.maximum(y, 0.0)
    y = y * y
    y = tl.sigmoid(y) * (2.0 + tl.sigmoid(2.0 * y))
    tl.store(z_ptr + i, y, mask=mask)


class ModelNew(Model):
    def forward(self, x):
        y = x.clone()
        y = y.view(-1, 8, WIDTH // 8)
        y = y.contiguous()
        z = torch.empty_like(y)
        kernel[(triton.cdiv(y.numel(), 4096),)](y, z, y.numel(), BLOCK=4096)
        y = z
        y = y.view(-1, OUT)
        y = torch.sort(y, dim=1, descending=True)[0][:, :4].sum(dim=1)
        return y

