# A drop-in for `Model` of the task task: the class `ModelNew`.
# Verified speedup 1.592x (95 % interval 1.439 to 1.760; A/A noise floor 0.038) on cuda:0, NVIDIA H200, torch
#   2.11.0.
# Measured 2026-11-25T02:25:53+00:00 by kernelwright 0.1.0, confirmed by a measurement that the search did not
#   choose it by.
# Policy builtin; techniques: fold-into-linear, cuda-graph.
# Label cuda-graph: replays a CUDA graph.
# task sha256 7e4bb3e37b0dbcf0027eef5f9686595921809c9d747708bc0db2c32c4d769dca
# candidate sha256 cbb37e9f0921de9964ab3bcd268ceeddd02743faefd68455df697fc450b62626
# Baselines over eager: compile 0.635x, cudagraph-fresh 1.647x. Over the best of them, cudagraph-fresh, this
#   is 0.966x (0.841 to 1.196).
#
# Use: from not_ahead import ModelNew; new = ModelNew(1024, 512); new.load_state_dict(old.state_dict());
#   new.train(old.training)
# Covers: float32[128, 1024]. On other shapes, types and memory layouts the reference's own forward runs,
#   right and no faster.
# Gradients: where they are enabled the reference's own forward runs and they flow. Call it under
#   torch.no_grad() or torch.inference_mode() to be faster.
# Needs: torch, a GPU like the one above for this speed; nothing of kernelwright.
# First call: import, construction and first call took 0.0 s when it was measured.

"""A drop-in for the reference module below.

Done: fold-into-linear.
"""

import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.gemm = nn.Linear(i, o)
    def forward(self, x):
        return nn.functional.leaky_relu(self.gemm(x) * 2.0, 0.1)

import torch
import torch.nn.functional as F

class Rewritten(Model):
    """The reference with another `forward` for the traced shapes and types; else `Model.forward` runs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._is_as_traced = args == (1024, 512) and not kwargs

    def forward(self, x):
        if not (self._is_as_traced and x.shape == (128, 1024) and x.dtype is torch.float32 and x.is_contiguous()):
            return super().forward(x)
        y = self.gemm.weight.t()
        y = torch.addmm(self.gemm.bias, x, y, beta=2.0, alpha=2.0)
        y = F.leaky_relu(y, negative_slope=0.1)
        return y


class _Recording:
    """A captured graph, the tensors it reads and writes, and where the module's state was."""

    def __init__(self, module, forward, inputs):
        tables = [table for child in module.modules() for table in (child._parameters, child._buffers)]
        self.slots = [(table, name) for table in tables for name in table if table[name] is not None]
        self.addresses = self.places()
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

    def places(self):
        return [table[name].data_ptr() for table, name in self.slots]

    def replay(self, inputs):
        for static, item in zip(self.inputs, inputs):
            static.copy_(item)
        self.graph.replay()
        if isinstance(self.outputs, torch.Tensor):
            return self.outputs.clone()
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self.outputs)


class ModelNew(Rewritten):
    """`Rewritten.forward` replayed from a CUDA graph: inputs are copied in, outputs are copied out."""

    def forward(self, *inputs):
        on_gpu = all(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs)
        if torch.is_grad_enabled() or not on_gpu:
            return super().forward(*inputs)
        key = (self.training, *((item.shape, item.stride(), item.dtype, item.device) for item in inputs))
        recordings = self.__dict__.setdefault("_recordings", {})
        recording = recordings.get(key)
        if recording is None or recording.places() != recording.addresses:
            recording = recordings[key] = _Recording(self, super().forward, inputs)
        return recording.replay(inputs)
