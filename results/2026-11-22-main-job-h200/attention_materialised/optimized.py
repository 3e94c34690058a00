# A drop-in for `Model` of the task attention_materialised: the class `ModelNew`.
# Verified speedup 1.334x (95 % interval 1.195 to 1.427; A/A noise floor 0.043) on cuda:0, NVIDIA H200, torch
#   2.11.0.
# Measured 2026-11-22T23:51:16+00:00 by kernelwright 0.1.0, re-measured independently of the search.
# Policy builtin; techniques: cuda-graph; labels: cuda-graph, suspicious-source.
# task sha256 c997d7f5ba132a352d2976c7e484b79232a8d22ae841e0288c8f9685d028100a
# candidate sha256 5cd25c5c276a6609dc938a3531d156aa8fcfec0f5f37af39e8b7135d24a5d5f9

"""A drop-in for the reference module below.

Done: cuda-graph.
"""

import math

import torch
from torch import nn

BATCH, HEADS, TOKENS, HEAD_FEATURES = 2, 4, 256, 32


class Model(nn.Module):
    """Scaled dot-product attention."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        return torch.matmul(torch.softmax(scores, dim=-1), v)

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
