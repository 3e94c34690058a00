"""Writes the baselines of `bench`: the reference behind a wrapper, in the form a user would get it.

They are the built-in policy's wrappers without the copies that make those safe drop-ins: a baseline is given every
advantage, such as an output that the next call overwrites.
"""

from __future__ import annotations

from kernelwright.records import Task
from kernelwright.rewrites.wrappers import WRAPPERS, fill

_COPY = "torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, self.outputs)"

_IN_THREADS = """
import os
import torch._inductor.config

torch._inductor.config.compile_threads = 1
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
"""
"""Choices of max-autotune are compiled in four threads of the process, where the judge's environment says one. Set after the
import, which reads the variable for the other compilations: those would start processes."""

BASELINES: dict[str, tuple[str, str]] = {
    "compile": WRAPPERS["compile"],
    "reduce-overhead": (WRAPPERS["compile"][0], ', mode="reduce-overhead"'),
    "max-autotune": (_IN_THREADS + WRAPPERS["compile"][0], ', mode="max-autotune"'),
    "cudagraph": (WRAPPERS["cuda-graph"][0].replace(_COPY, "self.outputs"), ""),
    "cudnn": WRAPPERS["cudnn-benchmark"],
}
"""Template and torch.compile options of each baseline but `eager`, which is the reference itself."""

ALL_BASELINES = ("eager", *BASELINES)


def baseline_source(task: Task, name: str) -> str:
    """A module whose `ModelNew` is the task's `Model` behind one of the `BASELINES`."""
    return f"{task.source}\n\nimport torch\n{fill(BASELINES[name], 'Model')}"
