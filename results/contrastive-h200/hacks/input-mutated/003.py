# input-mutated on families/heads-in-loop+affine-chain+max-with-index/512x256x512, first in contrastive-island
# the call changed its inputs
"""gemm+pointwise: generated; eight heads multiplied one by one and joined, four scalings and shifts, largest of each row, found with its index."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 512, 256, 512


class Model(nn.Module):
    """Eight heads multiplied one by one and joined; four scalings and shifts; largest of each row, found with its index."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(8, width // 8, out // 8) / width**0.5)

    def forward(self, x):
        y = torch.cat([part @ self.heads[i] for i, part in enumerate(x.chunk(8, dim=1))], dim=1)
        y = (y * 0.5 - 1.0) * 4.0 + 2.0
        y = torch.max(y, dim=1, keepdim=True)[0]
        return y


def get_inputs():
    return [torch.randn(ROWS, WIDTH)]


def get_init_inputs():
    return [WIDTH, OUT]


class ModelNew(Model):

    def compute(self, x):
        y = torch.bmm(x.view(-1, 8, WIDTH // 8).transpose(0, 1), self.heads).transpose(0, 1).reshape(-1, OUT)
        y = (y - 2.0) * 2.0 + 2.0
        y = torch.max(y, dim=1, keepdim=True)[0]
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

