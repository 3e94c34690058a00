"""Writes the baselines of `bench`: the reference behind a wrapper, in the form a user would get it.

They are the built-in policy's wrappers, some without the copies that make those safe drop-ins: such a baseline is given
every advantage, such as an output that the next call overwrites.
"""

from __future__ import annotations

from kernelwright.records import Task
from kernelwright.rewrites.wrappers import FRESH, WRAPPERS, fill

_IN_THREADS = """
import os
import torch._inductor.config

torch._inductor.config.compile_threads = 1
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
"""
"""Choices of max-autotune are compiled in four threads of the process, where the judge's environment says one. Set after the
import, which reads the variable for the other compilations: those would start processes."""

(_COMPILE,), _ = WRAPPERS["compile"]
(_GRAPH,), _ = WRAPPERS["cuda-graph"]

BASELINES: dict[str, tuple[tuple[str, ...], str]] = {
    "compile": ((_COMPILE,), ""),
    "reduce-overhead": ((_COMPILE,), ', mode="reduce-overhead"'),
    "max-autotune": ((_IN_THREADS + _COMPILE,), ', mode="max-autotune"'),
    "cudagraph": ((_GRAPH.replace(FRESH, "        return self.outputs\n"),), ""),
    "cudagraph-fresh": ((_GRAPH,), ""),
    "cudnn": WRAPPERS["cudnn-benchmark"],
    "max-autotune-fresh": WRAPPERS["compile-max-autotune"],
    "channels-last": WRAPPERS["channels-last"],
}
"""Templates and torch.compile options of each baseline but `eager`, which is the reference itself. The outputs of
`reduce-overhead`, `max-autotune` and `cudagraph` are overwritten by the next call; the others keep the contract."""

ALL_BASELINES = ("eager", *BASELINES)


def baseline_source(task: Task, name: str) -> str:
    """A module whose `ModelNew` is the task's `Model` behind one of the `BASELINES`."""
    return f"{task.source}\n\nimport torch\n{fill(BASELINES[name], 'Model')}"
