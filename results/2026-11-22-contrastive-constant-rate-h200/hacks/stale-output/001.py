# stale-output on families/input+dead-scores+hard-swish+scanned-sum/2048x1024x256, first in self-supervised
# on input set `own-again`: error 1.43e-01 rms, 3.17e-01 worst; allowed 1.78e-06 rms, 3.33e-06 worst
"""elementwise: generated; the input, row scores that nobody reads, hard swish spelt out, summed by way of a running sum."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, OUT = 2048, 1024, 256


class Model(nn.Module):
    """The input; row scores that nobody reads; hard swish spelt out; summed by way of a running sum."""

    def forward(self, x):
        y = x
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = torch.cumsum(y, dim=1)[:, -1:].clone()
        return y


def get_inputs():
    return [torch.randn(ROWS, OUT)]


def get_init_inputs():
    return []


class ModelNew(Model):

    def compute(self, x):
        y = x
        scores = torch.softmax(y @ y.t(), dim=-1)
        y = torch.relu(y)
        y = y * torch.clamp(y + 3.0, min=0.0, max=6.0) / 6.0
        y = torch.cumsum(y, dim=1)[:, -1:].clone()
        return y

    def forward(self, *inputs):
        key = (self.training, *((t.shape, t.stride()) for t in inputs))
        graphs = self.__dict__.setdefault("graphs", {})
        if key not in graphs:
            saved = [t.clone() for t in self.buffers()]
            static = [t.clone() for t in inputs]
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
        forold, *oldstatic = static
        for new, old in zip(static, oldstatic):
            new.copy_(old)
        graph.replay()
        return output.clone()

