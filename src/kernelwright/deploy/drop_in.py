"""Writes `optimized.py`: a winner's source under a header that says what was verified and how to use it."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from kernelwright.errors import TaskError
from kernelwright.records import Evaluation, Label, RunDirectory, Task
from kernelwright.records.decisions import BaselineComparison, gains_in_words
from kernelwright.tasks import bring_to_life, printing_aside
from kernelwright.version import __version__

FALLBACK = "else `Model.forward` runs"
"""Words with which the built-in policy describes what it writes for the traced shapes and types."""
_WIDTH = 108
_NOTICED_S = 1.0
"""Time of import and first call that a user notices. Our choice."""


def drop_in(
    task: Task,
    best: Evaluation,
    run: RunDirectory,
    *,
    module: str = "optimized",
    comparison: BaselineComparison | None = None,
) -> str:
    """The text of a drop-in; `module` is its name, and `comparison` is with the baselines that were measured."""
    measured = [str(comparison)] if comparison is not None else []
    lines = [*_provenance(task, best, run, comparison), *measured, "", *_use(task, best, run, module)]
    wrapped = [piece for line in lines for piece in textwrap.wrap(line, _WIDTH, subsequent_indent="  ") or [""]]
    return "\n".join(f"# {piece}".rstrip() for piece in wrapped) + "\n\n" + best.source


def _provenance(task: Task, best: Evaluation, run: RunDirectory, comparison: BaselineComparison | None) -> list[str]:
    environment = run.read_json("environment.json") or {}
    gpus = environment.get("gpu") or []
    torch_version = environment.get("packages", {}).get("torch")
    where = gpus[0].get("name") if gpus else environment.get("processor")
    return [
        f"A drop-in for `Model` of the task {task.id}: the class `ModelNew`. {gains_in_words(best, comparison)}.",
        f"Verified speedup {best.speedup:.3f}x (95 % interval {best.speedup_low:.3f} to {best.speedup_high:.3f}; "
        f"A/A noise floor {best.noise_floor:.3f}) on {best.device}, {where}, torch {torch_version}.",
        f"Measured {best.started} by kernelwright {__version__}, "
        "confirmed by a measurement that the search did not choose it by.",
        f"Policy {best.policy}; techniques: {', '.join(best.techniques) or 'none named'}.",
        *(f"Label {label}: {label.meaning}." for label in best.labels),
        f"task sha256 {best.task_sha256}",
        f"candidate sha256 {best.candidate_sha256}",
    ]


def _use(task: Task, best: Evaluation, run: RunDirectory, module: str) -> list[str]:
    """How to use the file, one answer a line."""
    try:
        with printing_aside():
            live = bring_to_life(task)
            arguments = ", ".join(repr(item) for item in live.init_inputs)
            shapes = ", ".join(map(_form, live.inputs(0, torch.device("meta"))))
    # A task may draw inputs in a way that needs their values; the header then names no shapes.
    except (TaskError, RuntimeError):
        arguments, shapes = "...", "what get_inputs of the task draws"
    if "stored_model(" in task.source:
        use = "the module of the search's result, or result.save(DIR) and kernelwright.load(model, DIR) in another process"
        return [f"Use: {use}", *_limits(best, run, shapes)]
    takes_weights = Label.STATE_DIFFERS not in best.labels
    load = "new.load_state_dict(old.state_dict())" if takes_weights else "its weights cannot be loaded from Model"
    return [
        f"Use: from {module} import ModelNew; new = ModelNew({arguments}); {load}; new.train(old.training)",
        *_limits(best, run, shapes),
    ]


def _limits(best: Evaluation, run: RunDirectory, shapes: str) -> list[str]:
    return [
        f"Covers: {shapes}. {_elsewhere(best)}",
        f"Gradients: {_gradients(best)}",
        f"Needs: {_needs(best)}",
        f"First call: {_first_call(best, run)}",
    ]


def _form(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_form, item))}]"
    return repr(item)[:40]


def _elsewhere(best: Evaluation) -> str:
    """Sentence on how the code behaves with other shapes and types."""
    if FALLBACK in best.source:
        return (
            "On other shapes, types and memory layouts the reference's own forward runs, right and no faster. It warns "
            "once; `last_path` tells which path the latest call took."
        )
    if _wraps(best) and "custom-kernel" not in best.labels:
        return "On other shapes and types the same operators are compiled or recorded again, at the first call's cost."
    return "Nothing is known about other shapes and types: judge them with a task of their own."


def _wraps(best: Evaluation) -> bool:
    return "torch.compile(" in best.source or "class _Recording" in best.source


def _gradients(best: Evaluation) -> str:
    if "not torch.is_grad_enabled()" in best.source or "if torch.is_grad_enabled()" in best.source:
        return (
            "where they are enabled the reference's own forward runs and they flow. "
            "Call it under torch.no_grad() or torch.inference_mode() to be faster."
        )
    if Label.CUSTOM_KERNEL in best.labels:
        return "not checked. The judge calls it under torch.no_grad(), and kernels of its own need a backward of their own."
    return "they flow, as through the PyTorch operators that it calls; its speed with them was not measured."


def _needs(best: Evaluation) -> str:
    """Compilers and hardware that the text asks for, beside torch."""
    on_gpu = best.device.startswith("cuda")
    wanted = []
    if on_gpu:
        wanted.append("a GPU like the one above for this speed")
    if "load_inline" in best.source or "cpp_extension.load(" in best.source:
        wanted.append("a C++ compiler and ninja" + (", and nvcc" if on_gpu else ""))
    elif "__global__" in best.source:
        wanted.append("nvcc")
    if "triton" in best.source:
        wanted.append("Triton")
    if "torch.compile(" in best.source:
        wanted.append("Triton and a C compiler" if on_gpu else "a C++ compiler")
    return ", ".join(["torch", *dict.fromkeys(wanted)]) + "; nothing of kernelwright." * ("kernelwright" not in best.source)


def _first_call(best: Evaluation, run: RunDirectory) -> str:
    """Cost of import, construction and first call, from the records."""
    screened = [one.spent_s for one in run.screened() if one.candidate_sha256 == best.candidate_sha256]
    spent_s, names = (screened[-1], ("build", "first call")) if screened else (
        best.checks.get("spent_s", {}), ("candidate build", "candidate call")
    )  # fmt: skip
    if not all(name in spent_s for name in names):
        return "its cost was not recorded."
    took_s = sum(spent_s[name] for name in names)
    if took_s < _NOTICED_S:
        return f"import, construction and first call took {took_s:.1f} s when it was measured."
    again = " A compiler runs; on the same machine its cache makes later processes quicker." if _compiles(best) else ""
    return f"import, construction and first call took {took_s:.0f} s when it was measured.{again}"


def _compiles(best: Evaluation) -> bool:
    return any(word in best.source for word in ("load_inline", "torch.compile(", "triton", "__global__"))
