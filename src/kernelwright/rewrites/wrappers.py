"""Writes `ModelNew` as a wrapper of another class: torch.compile, a CUDA graph, cuDNN's settings. No kernel is new.

The baselines of `bench` are the reference behind such a wrapper, in the form a user would get it. Some lack the copies that
make wrappers safe drop-ins: a baseline is given every advantage, such as an output that the next call overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from kernelwright.records import Task

_FOLDER = Path(__file__).with_name("templates")


def _text(name: str) -> str:
    """Text of a part of wrappers, with places for `$name`, `$base`, `$options` and `$otherwise`."""
    return "\n" + (_FOLDER / f"wrapper_{name}.py.txt").read_text(encoding="utf-8")


FRESH = """\
        if isinstance(self.outputs, torch.Tensor):
            return self.copied(self.outputs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, self.copied, self.outputs)
"""
"""Answer of a replay: copies, which the next replay does not overwrite."""

_FRESH_OUTPUTS = """
class ${name}(${base}):
    \"\"\"`${base}.forward` with copies of its outputs, which the next call does not overwrite.\"\"\"

    def forward(self, *inputs):
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, super().forward(*inputs))
"""

GUARD = "_fits_rewritten"
"""Method by which rewritten code tells whether a call is one that it was written for. No reference should have this name."""
_OTHERWISE = f"""\
            if not self.{GUARD}(*inputs):  # the reference runs, which may do what a graph cannot hold
                return super().forward(*inputs)
"""

_COMPILE, _CUDNN, _CHANNELS_LAST, _COPIES = map(_text, ("compile", "cudnn", "channels_last", "copies"))
_RECORDING = f"{_COPIES}\n{_text('recording')}{FRESH}"
_DIRECT_RECORDING = f"\nimport ctypes\n\n{_COPIES}\n{_text('recording_direct')}"
"""The same where inputs and outputs are copied by nodes of the graph."""
_CUDA_GRAPH = f"{_RECORDING}\n{_text('replayed')}"
_IN_THREAD = _CUDA_GRAPH.replace(
    "_Recording(self, super().forward, inputs)", "_beside(_Recording, self, super().forward, inputs)"
)
_SEARCHED_GRAPH = f"\nimport concurrent.futures\n{_text('in_thread')}\n{_IN_THREAD}"
"""A CUDA graph that is captured in a thread of its own, so that cuDNN's search is made whatever has run before."""

CHANNELS_LAST = "channels-last-cuda-graph"
"""For convolutions in two dimensions: the layout exists for tensors of rank 4 only."""
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
    CHANNELS_LAST: ((_CHANNELS_LAST, _SEARCHED_GRAPH), ""),
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
"""Proposed besides the same with a graph, where copies cost more than launches."""
KEEPS_LAYOUT = frozenset(WRAPPERS) - {CHANNELS_LAST, DIRECT[CHANNELS_LAST]}
"""Wrappers that hand inputs on as they are, so that they can wrap code written for one layout."""


def wrap(source: str, name: str, techniques: tuple[str, ...], draws: bool = False) -> str:
    """A candidate that wraps what `source` defines.

    Args:
        source: Text of a module that defines `Model` only, or `ModelNew`, which then is renamed to
        `Rewritten`.
        name: One of `WRAPPERS`.
        techniques: Names of changes, for the reader, when `source` has no docstring of its own.
        draws: True where it draws random numbers in a mode. torch.compile would draw others than eager does.
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
        Template(template).substitute(name=name, base=inner, options=options, otherwise=otherwise)
        for template, inner, name in zip(templates, classes, classes[1:], strict=False)
    )


_IN_THREADS = """
import os
import torch._inductor.config

torch._inductor.config.compile_threads = 1
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
"""
"""Choices of max-autotune are compiled in four threads of the process, where the judge's environment says one. Set after the
import, which reads the variable for the other compilations: those would start processes."""


def _for_weights(test: str) -> str:
    """A class that refuses to wrap a model none of whose weights has so many dimensions: it would time eager once more."""
    return f"""
class ${{name}}(${{base}}):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not any(value.dim() {test} for value in self.parameters()):
            raise TypeError("no weights of convolutions: some parameter's number of dimensions must be {test}")
"""


BASELINES: dict[str, tuple[tuple[str, ...], str]] = {
    "compile": ((_COMPILE,), ""),
    "reduce-overhead": ((_COMPILE,), ', mode="reduce-overhead"'),
    "max-autotune": ((_IN_THREADS + _COMPILE,), ', mode="max-autotune"'),
    "cudagraph": ((_CUDA_GRAPH.replace(FRESH, "        return self.outputs\n"),), ""),
    "cudagraph-fresh": ((_CUDA_GRAPH,), ""),
    "reduce-overhead-fresh": ((_COMPILE, _FRESH_OUTPUTS), ', mode="reduce-overhead"'),
    "cudnn": ((_for_weights(">= 3"), _CUDNN), ""),
    "max-autotune-fresh": WRAPPERS["compile-max-autotune"],
    "channels-last": ((_for_weights("== 4"), _CHANNELS_LAST), ""),
}
"""Templates and torch.compile options of each baseline but `eager`, which is the reference itself. The outputs of
`reduce-overhead`, `max-autotune` and `cudagraph` are overwritten by the next call; the others keep the contract. `cudnn` and
`channels-last` fail where no parameter can be a convolution's."""
BY_DEFAULT = ("compile", "reduce-overhead-fresh", "cudagraph-fresh", "cudnn", "channels-last")
"""Baselines of a search on a GPU where none are named: what keeps a drop-in's contract, without autotuners, which can take
longer than the whole search. The built-in policy proposes these where torch.compile is ahead (`decisions.tuning_pays`)."""

ALL_BASELINES = ("eager", *BASELINES)


def baseline_source(task: Task, name: str) -> str:
    """A module whose `ModelNew` is the task's `Model` behind one of the `BASELINES`."""
    return f"{task.source}\n\nimport torch\n{fill(BASELINES[name], 'Model')}"


COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
"""Modes of torch.compile that differ on a GPU; on a processor the second one is the first."""


def compiled_source(task: Task, mode: str) -> str:
    """A module whose `ModelNew` is the task's `Model` as torch.compile compiles it in one of the `COMPILE_MODES`."""
    wrapper = (_IN_THREADS + _COMPILE,), f', mode="{mode}"'
    return f"{task.source}\n\nimport torch\n{fill(wrapper, 'Model')}"
