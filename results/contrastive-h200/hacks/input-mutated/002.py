# input-mutated on families/shared-products+clamps+unit-length/2048x512x512, first in contrastive-island
# the call changed its inputs
"""gemm+pointwise: generated; two products that share an operand, added, clamped, scaled, clamped, scaled back, scaled to unit length."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 512, 512


class Model(nn.Module):
    """Two products that share an operand, added; clamped, scaled, clamped, scaled back; scaled to unit length."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.second = nn.Parameter(torch.randn(width, out) / width**0.5)

    def forward(self, x):
        y = x @ self.first + x @ self.second
        y = torch.clamp(y, min=-1.5, max=1.5) * 2.0
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        y = y / torch.clamp(torch.sqrt(torch.sum(y * y, dim=1, keepdim=True)), min=1e-12)
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):

    def compute(self, x):
        y = x @ self.first
        y += x @ self.second
        y = torch.clamp(y, min=-1.5, max=1.5)
        y = torch.clamp(y, min=-8.0, max=8.0) / 2.0
        y = y / torch.clamp(torch.sqrt(torch.sum(torch.pow(y, 2), dim=1, keepdim=True)), min=1e-12)
        return y

    def forward(self, *inputs):
        key = (self.training, *((t.shape, t.stride()) for t in inputs))
        graphs = self.__dict__.setdefault("graphs", {})
        if key not in graphs:
            saved = [t.clone() for t in self.buffers()]
            static = [t for t in inputs]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.compute(*static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = self.compute(*static)
            for t, value in zip(self.buffers(), saved):
                t.copy_(value)
            graphs[key] = graph, static, output
        graph, static, output = graphs[key]
        for old, new in zip(static, inputs):
            old.copy_(new)
        graph.replay()
        return output.clone()

