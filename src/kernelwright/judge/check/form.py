"""Compares an answer's form with the reference's: structure, types, strides, and whose memory the outputs lie in."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernelwright.errors import listed
from kernelwright.judge.check.oracle import Outputs
from kernelwright.judge.check.trial import RejectionError, Trial
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.replies import Output
from kernelwright.judge.isolation.side import CallOutput, Side
from kernelwright.records import Label, Reason


def reject_overwritten(trial: Trial, detail: str = "the first call's output was changed by a later call") -> None:
    """Reject a candidate whose calls share the memory of their outputs, or label it where that is a CUDA graph's buffer."""
    if Label.CUDA_GRAPH not in trial.findings.labels:
        raise RejectionError(Reason.OUTPUT_OVERWRITTEN, detail)
    trial.findings.label(Label.ALIASED_OUTPUT, detail)


def held_output(trial: Trial, candidate: Side, index: int) -> Outputs | None:
    """The output of an earlier call as it is now; None where a CUDA graph of torch.compile may have overwritten it."""
    try:
        return candidate.recopy(index)
    except WorkerError as failure:
        if failure.reason is not Reason.RUNTIME_ERROR:
            raise
        reject_overwritten(trial, f"an earlier output cannot be read after later calls: {failure.detail}")
        return None


def check_form(trial: Trial, reference: CallOutput, answer: CallOutput, *, strides: bool = True) -> None:
    """Reject an answer whose outputs have another form than the reference's, or that changed its inputs.

    Strides count where the inputs are laid out as the task draws them; an operator that lets its output follow an
    unusual layout promises nothing.
    """
    wanted, found = reference.described, answer.described
    if found.strange:
        raise RejectionError(Reason.WRONG_TYPE, f"returned {listed(found.strange, 3)}; wanted plain torch.Tensor")
    rounding = [2 * torch.finfo(dtype).eps for dtype in trial.facts.output_dtypes if dtype.is_floating_point]
    alike = _same_structure(found.skeleton, wanted.skeleton, max([_NUMBERS_DIFFER, *rounding]))
    if not alike or len(found.outputs) != len(wanted.outputs):
        raise RejectionError(
            Reason.WRONG_TYPE, f"returned the structure {str(found.skeleton)[:200]}; wanted {wanted.skeleton}"
        )
    for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
        for name, reason in (("shape", Reason.WRONG_SHAPE), ("dtype", Reason.WRONG_DTYPE), ("device", Reason.WRONG_DEVICE)):
            if getattr(mine, name) != getattr(theirs, name):
                raise RejectionError(reason, f"returned {name} {getattr(mine, name)}; wanted {getattr(theirs, name)}")
        if set(mine.traits) - set(theirs.traits):
            raise RejectionError(Reason.WRONG_TYPE, f"returned a tensor that is {' and '.join(mine.traits)}")
        if strides and not _strides_equal(mine, theirs):
            trial.findings.label(Label.STRIDES_DIFFER, f"returned strides {mine.stride}; wanted {theirs.stride}")
        extra = set(mine.aliases) - set(theirs.aliases)
        trial.findings.reference_reuses_output |= "earlier output" in theirs.aliases
        if theirs.aliases or trial.findings.reference_reuses_output:
            extra.discard("earlier output")  # memory of its input or state, or kept by the reference as well
        if extra == {"earlier output"}:
            reject_overwritten(trial, "an output lies where an earlier one does, which the caller still has")
        elif extra:
            raise RejectionError(
                Reason.OUTPUT_ALIASES, f"an output shares memory with the call's {' and '.join(sorted(extra))}"
            )
    if not answer.inputs_intact and reference.inputs_intact:
        raise RejectionError(Reason.INPUT_MUTATED, "the call changed its inputs")


_NUMBERS_DIFFER = 1e-5
"""Relative error allowed of a Python float among outputs, for another order of summing; TF32 leaves more. Our choice."""


def _same_structure(mine: Any, theirs: Any, allowed: float) -> bool:
    """Whether two skeletons are equal, numbers by their type too, and floats as far as rounding allows."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same_structure(mine[key], theirs[key], allowed) for key in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(_same_structure(*pair, allowed) for pair in zip(mine, theirs, strict=True))
    if isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=allowed) or (math.isnan(mine) and math.isnan(theirs))
    return bool(mine == theirs)


def _strides_equal(mine: Output, theirs: Output) -> bool:
    """Strides of dimensions of size 1 address nothing."""
    strides = zip(theirs.shape, mine.stride, theirs.stride, strict=False)
    alike = 0 in theirs.shape or all(size == 1 or a == b for size, a, b in strides)
    return alike and len(mine.stride) == len(theirs.stride)
