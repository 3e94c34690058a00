# families/input+softsign+gelu-formula+softmax/2048x512x256, written 1 times by held-out base:evolutionary
# naive: accepted, 1.29x; judge: wrong-output
# on input set `own`: error 1.83e-03 rms, 4.92e-03 worst; allowed 1.47e-06 rms, 3.29e-06 worst
"""elementwise: generated; the input, softsign spelt out, GELU by its tanh formula, softmax spelt out."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 512, 256


class Model(nn.Module):
    """The input; softsign spelt out; GELU by its tanh formula; softmax spelt out."""

    def forward(self, x):
        y = x
        y = y / (1.0 + torch.abs(y))
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        m = torch.max(y, dim=1, keepdim=True)[0]
        e = torch.exp(y - m)
        y = e / torch.sum(e, dim=1, keepdim=True)
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def forward(self, x):
        y = x
        y = y / (1.0 + torch.abs(y))
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.square(y))))
        y = torch.softmax(y, dim=1)
        return y

