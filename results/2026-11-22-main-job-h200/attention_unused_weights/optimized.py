# A drop-in for `Model` of the task attention_unused_weights: the class `ModelNew`.
# Verified speedup 4.290x (95 % interval 4.008 to 4.553; A/A noise floor 0.031) on cuda:1, NVIDIA H200, torch
#   2.11.0.
# Measured 2026-11-22T23:51:41+00:00 by kernelwright 0.1.0, re-measured independently of the search.
# Policy builtin; techniques: cuda-graph; labels: cuda-graph, suspicious-source.
# task sha256 3e8c2b6a5fbae6e7002e5ba883ef0b69813859f8d544c304d38eef119a3b8313
# candidate sha256 33fb4d51758226f199c39d14471c7998f7bc60735bb81500b5900227e635fe16

"""A drop-in for the reference module below.

Done: cuda-graph.
"""

import torch
from torch import nn

BATCH, TOKENS, FEATURES, HEADS = 2, 128, 128, 4


class Model(nn.Module):
    """Multi-head self-attention, residual, layer norm."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, heads, batch_first=True)
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        return self.norm(x + attended)

import torch


class _Recording:
    """A captured graph, the tensors it reads and writes, and where the module's state was."""

    def __init__(self, module, forward, inputs):
        tables = [table for child in module.modules() for table in (child._parameters, child._buffers)]
        self.slots = [(table, name) for table in tables for name in table if table[name] is not None]
        self.addresses = self.where()
        self.inputs = [item.clone() for item in inputs]
        # Warming up must leave no trace: running statistics and the random state are put back.
        saved = [tensor.clone() for tensor in module.buffers()]
        random_state = torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = forward(*self.inputs)
        for tensor, value in zip(module.buffers(), saved):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random_state)

    def where(self):
        return [table[name].data_ptr() for table, name in self.slots]

    def replay(self, inputs):
        for static, item in zip(self.inputs, inputs):
            static.copy_(item)
        self.graph.replay()
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self.outputs)


class ModelNew(Model):
    """`Model.forward` replayed from a CUDA graph: inputs are copied in, outputs are copied out."""

    def forward(self, *inputs):
        on_gpu = all(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs)
        if torch.is_grad_enabled() or not on_gpu:
            return super().forward(*inputs)
        key = (self.training, *((item.shape, item.stride(), item.dtype, item.device) for item in inputs))
        recordings = self.__dict__.setdefault("_recordings", {})
        recording = recordings.get(key)
        if recording is None or recording.where() != recording.addresses:
            recording = recordings[key] = _Recording(self, super().forward, inputs)
        return recording.replay(inputs)
