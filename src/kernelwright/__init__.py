"""Kernelwright: reinforcement learning that makes GPU code faster, under one judge that is hard to fool.

The command line's verbs are functions:

    evaluate(task, candidate)    a verdict, a reason, a paired speedup with its interval
    evaluate_compiled(model, example_inputs=(x,))    the same of torch.compile, in each mode: which is right?
    optimize(model, example_inputs=(x,), out=...)    the model with verified faster code in place
    optimize(task, out=...)      a verified faster drop-in
    load(model, folder)          the same again, without a search
    bench(suite, out=...)        a suite against its baselines
    jit                          a decorator for Triton functions that runs their tuned machine code

They are imported when first used, so that `import kernelwright` does not load torch. The other verbs are functions of their
modules: docs/cli.md names them. Everything that is raised on purpose is a `kernelwright.errors.KernelwrightError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelwright.version import __version__

if TYPE_CHECKING:
    from kernelwright.api import bench, evaluate, evaluate_compiled, load, optimize
    from kernelwright.deploy.triton_jit import jit
    from kernelwright.tasks.in_memory import Inputs

__all__ = ["Inputs", "__version__", "bench", "evaluate", "evaluate_compiled", "jit", "load", "optimize"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "jit":
        from kernelwright.deploy import triton_jit

        return triton_jit.jit
    if name == "Inputs":
        from kernelwright.tasks import in_memory

        return in_memory.Inputs
    if name in ("bench", "evaluate", "evaluate_compiled", "load", "optimize"):
        from kernelwright import api

        return getattr(api, name)
    raise AttributeError(f"module 'kernelwright' has no attribute {name!r}")
