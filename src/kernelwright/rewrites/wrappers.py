"""Writes `ModelNew` as a wrapper of another class: torch.compile, a CUDA graph, cuDNN's settings. No kernel is new."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_COMPILE = '''
class {name}({base}):
    """`{base}.forward` through torch.compile."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._compiled = torch.compile(super().forward{options})

    def forward(self, *inputs):
        return self._compiled(*inputs)
'''

FRESH = """\
        if isinstance(self.outputs, torch.Tensor):
            return self.copied(self.outputs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, self.copied, self.outputs)
"""
"""How a replay answers: with copies, which the next replay does not overwrite."""

_COPIED = '''
def _is_dense(tensor):
    """Whether `clone` keeps the strides: it closes the gaps of a view of something larger."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _copied(tensor):
    """A fresh copy with the same strides and gaps."""
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    # Along a dimension of stride 0 there is one element, which may be written once.
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    fresh[once].copy_(tensor[once])
    return fresh

'''

_RECORDING = (
    _COPIED
    + '''
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
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(self.outputs) if isinstance(leaf, torch.Tensor)]
        self.copied = torch.clone if all(map(_is_dense, leaves)) else _copied
        for tensor, value in zip(module.buffers(), saved):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random_state)

    def places(self):
        return [table[name].data_ptr() for table, name in self.slots]

    def replay(self, inputs):
        for static, item in zip(self.inputs, inputs):
            static.copy_(item)
        self.graph.replay()
'''
    + FRESH
)

_DIRECT_RECORDING = (
    "\nimport ctypes\n\n"
    + _COPIED
    + '''
class _Recording:
    """A captured graph that copies from and to the caller's tensors, and where the module's state was.

    Each call gives the graph's copies new addresses, which takes less time than launching copies around it.
    """

    def __init__(self, module, forward, inputs):
        tables = [table for child in module.modules() for table in (child._parameters, child._buffers)]
        self.slots = [(table, name) for table in tables for name in table if table[name] is not None]
        self.addresses = self.places()
        own = [item.clone() for item in inputs]
        self.given = [torch.empty_like(item) for item in own]
        # Warming up must leave no trace: running statistics and the random state are put back.
        saved = [tensor.clone() for tensor in module.buffers()]
        random_state = torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward(*own)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            for static, item in zip(own, self.given):
                static.copy_(item)
            answer = forward(*own)
            self.single = isinstance(answer, torch.Tensor)
            self.leaves, self.form = torch.utils._pytree.tree_flatten(answer)
            results = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
            self.copied = torch.clone if all(map(_is_dense, results)) else _copied
            self.results = [torch.empty_like(leaf).copy_(leaf) if _is_dense(leaf) else _copied(leaf) for leaf in results]
        self.graph.instantiate()
        self.own, self.copies = own, None
        # A tensor with gaps is copied by a kernel, whose addresses stay: then the copies are made around the graph.
        plain = not any(item.is_complex() for item in own) and self.copied is torch.clone
        if hasattr(self.graph, "raw_cuda_graph_exec") and plain:
            self.copies = self.found_copies()
        for tensor, value in zip(module.buffers(), saved):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random_state)

    def found_copies(self):
        """For each tensor of the caller a copy's parameters, which word is the address, and what sets it; or None."""
        driver, context, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_size_t()
        graph, launched = (ctypes.c_void_p(item()) for item in (self.graph.raw_cuda_graph, self.graph.raw_cuda_graph_exec))
        driver.cuCtxGetCurrent(ctypes.byref(context))
        driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
        nodes, found = (ctypes.c_void_p * count.value)(), {{}}
        driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
        for node in map(ctypes.c_void_p, nodes):
            # CUDA_MEMCPY3D as 25 words: the seventh is the source, the eighteenth the destination.
            kind, words = ctypes.c_int(), (ctypes.c_uint64 * 25)()
            driver.cuGraphNodeGetType(node, ctypes.byref(kind))
            if kind.value == 1 and driver.cuGraphMemcpyNodeGetParams(node, words) == 0:
                found[6, words[6]] = found[17, words[17]] = node, words
        wanted = [*((6, item.data_ptr()) for item in self.given), *((17, item.data_ptr()) for item in self.results)]
        if not all(one in found for one in wanted):
            return None
        self.set = driver.cuGraphExecMemcpyNodeSetParams
        copies = [(found[one][1], one[0], (launched, *found[one], context)) for one in wanted]
        return None if any(self.set(*arguments) for _, _, arguments in copies) else copies

    def places(self):
        return [table[name].data_ptr() for table, name in self.slots]

    def replay(self, inputs):
        if self.copies is None or any(item.is_neg() for item in inputs):
            inputs = [static.copy_(item) for static, item in zip(self.given, inputs)]
        outputs = [torch.empty_like(item) for item in self.results]
        if self.copies is not None:
            for (words, place, arguments), tensor in zip(self.copies, (*inputs, *outputs)):
                words[place] = tensor.data_ptr()
                if self.set(*arguments):
                    raise RuntimeError("the CUDA graph took no new address")
        self.graph.replay()
        if self.copies is None:
            outputs = [self.copied(item) for item in self.results]
        if self.single:
            return outputs[0]
        made = iter(outputs)
        leaves = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return torch.utils._pytree.tree_unflatten(leaves, self.form)
'''
)
"""The same where inputs and outputs are copied by nodes of the graph."""

_REPLAYED = '''
class {name}({base}):
    """`{base}.forward` replayed from a CUDA graph: inputs are copied in, outputs are copied out."""

    def forward(self, *inputs):
        on_gpu = all(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs)
        if torch.is_grad_enabled() or not on_gpu:
            return super().forward(*inputs)
        key = (self.training, *((item.shape, item.stride(), item.dtype, item.device) for item in inputs))
        recordings = self.__dict__.setdefault("_recordings", {{}})
        recording = recordings.get(key)
        if recording is None or recording.places() != recording.addresses:
{otherwise}            recording = recordings[key] = _Recording(self, super().forward, inputs)
        return recording.replay(inputs)
'''

GUARD = "_fits_rewritten"
"""Method by which rewritten code tells whether a call is one that it was written for. No reference should have this name."""
_OTHERWISE = f"""\
            if not self.{GUARD}(*inputs):  # the reference runs, which may do what a graph cannot hold
                return super().forward(*inputs)
"""

_CUDA_GRAPH = _RECORDING + "\n" + _REPLAYED

_CUDNN = '''
class {name}({base}):
    """`{base}.forward` with cuDNN's algorithm search; the setting is put back after each call."""

    def forward(self, *inputs):
        previous = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return super().forward(*inputs)
        finally:
            torch.backends.cudnn.benchmark = previous
'''

_CHANNELS_LAST = '''
def _layout(items, memory_format):
    """The 4-d tensors among nested outputs or inputs in this memory format."""
    def change(item):
        return item.contiguous(memory_format=memory_format) if item.dim() == 4 else item

    return torch.utils._pytree.tree_map_only(torch.Tensor, change, items)


class {name}({base}):
    """`{base}.forward` in channels-last layout with cuDNN's algorithm search; outputs in the usual layout."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def forward(self, *inputs):
        previous = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            outputs = super().forward(*_layout(inputs, torch.channels_last))
        finally:
            torch.backends.cudnn.benchmark = previous
        return _layout(outputs, torch.contiguous_format)
'''

_BESIDE = '''
def _beside(work, *arguments):
    """What `work` returns in a thread of its own: cuDNN's plans are kept for each thread, and the first one found stays.

    A thread that has run a convolution without the search would not search again.
    """
    stream = torch.cuda.current_stream()

    def run():
        with torch.no_grad(), torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return work(*arguments)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()

'''

_SEARCHED_GRAPH = (
    "\nimport concurrent.futures\n"
    + _BESIDE
    + _CUDA_GRAPH.replace("_Recording(self, super().forward, inputs)", "_beside(_Recording, self, super().forward, inputs)")
)
"""A CUDA graph that is captured in a thread of its own, so that cuDNN's search is made whatever has run before."""

WRAPPERS: dict[str, tuple[tuple[str, ...], str]] = {
    "compile": ((_COMPILE,), ""),
    # Replays of torch.compile's own graphs check its guards first, which takes longer than a short call.
    "compile-cuda-graph": ((_COMPILE, _CUDA_GRAPH), ""),
    "compile-max-autotune": ((_COMPILE, _CUDA_GRAPH), ', mode="max-autotune-no-cudagraphs"'),
    "cuda-graph": ((_CUDA_GRAPH,), ""),
    "cudnn-benchmark": ((_CUDNN,), ""),
    "cudnn-cuda-graph": ((_CUDNN, _SEARCHED_GRAPH), ""),
    "compile-cudnn-cuda-graph": ((_COMPILE, _CUDNN, _SEARCHED_GRAPH), ""),
    "compile-cudnn": ((_COMPILE, _CUDNN), ""),
    "channels-last": ((_CHANNELS_LAST,), ""),
    "channels-last-cuda-graph": ((_CHANNELS_LAST, _SEARCHED_GRAPH), ""),
}
DIRECT = {name: name.replace("cuda-graph", "direct-cuda-graph") for name in WRAPPERS if name.endswith("cuda-graph")}
"""Wrappers with a graph, and the same with a graph that copies from and to the caller's tensors itself."""
WRAPPERS |= {
    direct: (tuple(part.replace(_RECORDING, _DIRECT_RECORDING) for part in WRAPPERS[name][0]), WRAPPERS[name][1])
    for name, direct in DIRECT.items()
}
"""Name of a technique: templates of classes, each around the one before, and the options they pass to torch.compile."""
DRAWING = {
    "": ', options={"fallback_random": True}',
    # `mode` and `options` exclude each other; these are the mode's own.
    ', mode="max-autotune-no-cudagraphs"': (
        ', options={"fallback_random": True, "max_autotune": True, "coordinate_descent_tuning": True}'
    ),
}
"""For options passed to torch.compile, the same with which it draws the random numbers that eager draws, as for dropout."""
WITH_GRAPH = frozenset(name for name, (parts, _) in WRAPPERS.items() if any("class _Recording" in part for part in parts))
"""Wrappers that capture a CUDA graph."""
SAME_ROUNDING = frozenset({"cuda-graph", DIRECT["cuda-graph"]})
"""Wrappers that launch the very kernels of the reference."""

ON_ANY_DEVICE = ("compile",)
ON_CUDA = ("cuda-graph", "compile-cuda-graph", "compile", "compile-max-autotune")
WITH_CONVOLUTIONS = ("cudnn-cuda-graph", "compile-cudnn-cuda-graph", "cudnn-benchmark")
WITH_LARGE_CONVOLUTIONS = ("compile-cudnn",)
"""In place of the same with a graph, where copies cost more than launches."""
WITH_CONVOLUTIONS_2D = ("channels-last-cuda-graph", "channels-last")
"""Their layout exists for tensors of rank 4 only."""
KEEPS_LAYOUT = frozenset(WRAPPERS) - {*WITH_CONVOLUTIONS_2D, DIRECT["channels-last-cuda-graph"]}
"""Wrappers that hand inputs on as they are, so that they can wrap code written for one layout."""


def wrap(source: str, name: str, techniques: tuple[str, ...], draws: bool = False) -> str:
    """A candidate that wraps what `source` defines.

    Args:
        source: Text of a module that defines `Model` only, or `ModelNew`, which then is renamed to
        `Rewritten`.
        name: Which wrapper.
        techniques: What was done, for the reader, when `source` has no docstring of its own.
        draws: Whether it draws random numbers in any mode. torch.compile has its own else, and the outputs are others.
    """
    if "class ModelNew(Model):" in source:
        base, text = "Rewritten", source.replace("class ModelNew(Model):", "class Rewritten(Model):")
    else:
        header = f'"""A drop-in for the reference module below.\n\nDone: {", ".join(techniques)}.\n"""'
        base, text = "Model", f"{header}\n\n{source}\n\nimport torch\n"
    parts, options = WRAPPERS[name]
    otherwise = _OTHERWISE if f"    def {GUARD}(" in source else ""
    return text + "\n" + fill((parts, DRAWING[options] if draws else options), base, otherwise)


def fill(wrapper: tuple[Sequence[str], str], base: str, otherwise: str = "") -> str:
    """The text of a wrapper around the class `base`, with what a CUDA graph does before it captures another kind of call."""
    templates, options = wrapper
    classes = [base, *("Inner", "Outer")[: len(templates) - 1], "ModelNew"]
    return "\n".join(
        textwrap.dedent(template.format(name=name, base=inner, options=options, otherwise=otherwise))
        for template, inner, name in zip(templates, classes, classes[1:], strict=False)
    )
