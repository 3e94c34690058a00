"""Compares what a module shows to its user with the reference's, and decides by a candidate's contract what findings mean.

A check returns findings or raises: it never asks what the settings allow. `Demands` alone says which findings end an
examination and which decide the verdict. Screening compares the form of outputs by the same function.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from inspect import Parameter
from typing import Any, NamedTuple

import torch

from kernelwright.errors import InternalError, listed
from kernelwright.judge.check.compare import Distance, apart
from kernelwright.judge.check.facts import TaskFacts
from kernelwright.judge.check.oracle import OutOfDomainError, Outputs
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import BuiltModule, CallOutput, Described, Inspection, Output, Side
from kernelwright.judge.settings import DROP_IN_LABELS, Settings
from kernelwright.records import Contract, KeptContract, Label, Reason
from kernelwright.records.scoring import Score
from kernelwright.tasks import has_nan

_EXCUSABLE = frozenset(
    {
        Reason.RUNTIME_ERROR,
        Reason.MODE_MISMATCH,
        Reason.WRONG_OUTPUT,
        Reason.PRECISION_DOWNGRADE,
        Reason.NON_FINITE_OUTPUT,
        Reason.WRONG_TYPE,
        Reason.WRONG_SHAPE,
        Reason.WRONG_DTYPE,
        Reason.WRONG_DEVICE,
    }
)
"""Reasons of an answer that is wrong. Others speak of cheating, or of a process that is gone."""
_LABEL_REASONS = {
    Label.STATE_DIFFERS: Reason.STATE_MISMATCH,
    Label.PREPACKED_WEIGHTS: Reason.STALE_WEIGHTS,
    Label.STRIDES_DIFFER: Reason.WRONG_STRIDES,
    Label.CONTIGUOUS_ONLY: Reason.LAYOUT_DEPENDENT,
    Label.ALIASED_OUTPUT: Reason.OUTPUT_OVERWRITTEN,
}


class RejectionError(InternalError):
    """The candidate may not replace its reference."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Failed(NamedTuple):
    """Reason for which a candidate is not accepted, and its detail; no exception, whose traceback holds tensors."""

    reason: Reason
    detail: str


class Asks(Enum):
    """Contracts that ask for what a candidate lacks."""

    BOTH = "both"
    DROP_IN = "drop-in only"
    NEITHER = "neither"


class CheckFinding(NamedTuple):
    """Deviation from the reference, or a remark."""

    asks: Asks
    reason: Reason
    """Reason of the rejection where it leads to one."""
    detail: str
    label: Label | None = None

    @classmethod
    def remark(cls, label: Label, detail: str) -> CheckFinding:
        """A label. Those of what keeps the contract `kernelbench` alone are asked for by drop-ins."""
        asks = Asks.DROP_IN if label in DROP_IN_LABELS else Asks.NEITHER
        return cls(asks, _LABEL_REASONS.get(label, Reason.FORBIDDEN_LABEL), f"{label}: {detail}", label)

    @classmethod
    def lacking(cls, reason: Reason, detail: str, label: Label | None = None) -> CheckFinding:
        """A deviation that makes it no drop-in, though it may keep the contract `kernelbench`."""
        return cls(Asks.DROP_IN, reason, detail, label)

    @classmethod
    def wrong(cls, reason: Reason, detail: str) -> CheckFinding:
        """A deviation that neither contract permits."""
        return cls(Asks.BOTH, reason, detail)

    @classmethod
    def excused(
        cls, failure: RejectionError | WorkerError, reason: Reason, refusal: Label | None = None
    ) -> CheckFinding | None:
        """A failure in what only a drop-in is asked; None where it is more than that.

        `refusal` is the label of a candidate that raises an error of its own; one that crashes is excused too.
        """
        crashed = failure.reason is Reason.CRASHED or "CUDA error" in failure.detail
        if failure.reason not in _EXCUSABLE and not (refusal and crashed):
            return None
        refuses = failure.reason is Reason.RUNTIME_ERROR and not crashed
        return cls.lacking(reason, f"{failure.reason}: {failure.detail}", refusal if refuses else None)


class Demands(NamedTuple):
    """Contract that decides a verdict, and labels that reject."""

    contract: Contract = Contract.DROP_IN
    forbidden: AbstractSet[Label] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> Demands:
        """The demands of these settings."""
        return cls(settings.contract, settings.forbid)

    def ends(self, finding: CheckFinding) -> bool:
        """True where nothing more is asked after a finding; otherwise one examination answers both contracts."""
        return finding.asks is Asks.BOTH or (finding.asks is Asks.NEITHER and finding.label in self.forbidden)

    def rejects(self, finding: CheckFinding) -> bool:
        """True where a finding decides the verdict. Settings may allow a label, and with it what it stands for."""
        if finding.label is not None:
            return finding.label in self.forbidden
        return finding.asks is Asks.BOTH or (finding.asks is Asks.DROP_IN and self.contract is Contract.DROP_IN)


class CheckFindings:
    """Findings and measurements of one evaluation. They outlive a rejection, since the record shows them too."""

    def __init__(self, demands: Demands, labels: Iterable[Label] = ()) -> None:
        self.demands = demands
        self.labels = set(labels)
        self.checks: dict[str, Any] = {}
        self.missing: dict[Reason, str] = {}
        """Deviations that make it no drop-in: the first detail of each reason."""
        self.rejection: Failed | None = None
        """The first of these that decides the verdict."""
        self.failure: Failed | None = None
        """Failure for which the check or timing broke off; it keeps neither contract."""
        self.score: Score | None = None
        self.reference_reuses_output = False
        """True once an output of the reference was seen in the memory of an earlier one."""
        self.phases_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that each part took; `docs/record-format.md` says which of them include waiting for the device."""

    def add(self, findings: Iterable[CheckFinding]) -> None:
        """Keep findings in their order.

        Raises:
            RejectionError: one of them ends the examination.
        """
        for finding in findings:
            if self.demands.ends(finding):
                raise RejectionError(finding.reason, finding.detail)
            if finding.label is not None:
                self.labels.add(finding.label)
            if finding.asks is Asks.DROP_IN:
                self.missing.setdefault(finding.reason, finding.detail)
            if self.rejection is None and self.demands.rejects(finding):
                self.rejection = Failed(finding.reason, finding.detail)

    def remark(self, label: Label, detail: str) -> None:
        """Keep a label; raises as `add`."""
        self.add([CheckFinding.remark(label, detail)])

    def ran_out(self) -> bool:
        """True where the examination broke off for want of memory."""
        return self.failure is not None and self.failure.reason is Reason.OUT_OF_MEMORY

    @property
    def decisive(self) -> Failed | None:
        """Reason of the verdict; None for an accepted candidate."""
        return self.rejection or self.failure

    def kept(self) -> dict[Contract, KeptContract]:
        """Answers to both contracts, after a check that ended with its failure."""
        failed = () if self.failure is None else (self.failure.reason,)
        missing = {Contract.DROP_IN: (*dict.fromkeys((*self.missing, *failed)),), Contract.KERNELBENCH: failed}
        return {contract: KeptContract(kept=not reasons, missing=reasons) for contract, reasons in missing.items()}

    @contextlib.contextmanager
    def skipping(self, input_set: str, label: Label | None = None) -> Iterator[None]:
        """Leave out the rest of a block where an input set lies outside the reference's domain, and note why; with a label
        where that must be shown."""
        try:
            yield
        except OutOfDomainError as error:
            self.checks.setdefault("skipped", {})[input_set] = str(error)
            if label is not None:
                self.remark(label, str(error))


_WRITTEN_ALIKE = Distance(0.02, math.inf, 0.02)
"""Distance allowed of what a call writes into its inputs from what the reference writes there. Our choice."""
_NUMBERS_DIFFER = 1e-5
"""Relative error allowed of a Python float among outputs, for another order of summing; TF32 leaves more. Our choice."""
_LABELLED = ("flags", "environment", "warnings")
"""Settings that change how fast or how exact the user's other modules are, what compilers and libraries read, and what is
printed; all others a drop-in must leave alone."""


def interface_findings(built: BuiltModule, facts: TaskFacts) -> list[CheckFinding]:
    """Deviations of a new module's class, mode and `state_dict`."""
    if built.missing is not None:
        return [CheckFinding.wrong(Reason.NO_MODEL_NEW, "the module defines no class ModelNew that is a torch.nn.Module")]
    findings = []
    if built.training != (training := facts.oracle.training):
        detail = f"built with training={built.training}, the reference with {training}"
        findings.append(CheckFinding.lacking(Reason.MODE_MISMATCH, detail))
    wanted = {key: (spec.dtype, spec.shape) for key, spec in facts.shapes.state}
    wanted |= {key: (str(value.dtype).removeprefix("torch."), (*value.shape,)) for key, value in facts.oracle.sparse.items()}
    found = {key: (dtype, shape) for key, dtype, shape in built.state}
    if wanted != found:
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        other = sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
        parts = {"missing": missing, "unexpected": extra, "other shape or dtype": other}
        detail = "state_dict: " + "; ".join(f"{what} {listed(map(repr, names))}" for what, names in parts.items())
        findings.append(CheckFinding.remark(Label.STATE_DIFFERS, detail))
    if built.signature is not None and (refused := _refused(built.signature, facts.signature)):
        detail = f"its forward does not take {listed(refused)}"
        findings.append(CheckFinding.remark(Label.SIGNATURE_DIFFERS, detail))
    return findings


def _refused(found: Sequence[tuple[str, int]], wanted: Sequence[tuple[str, int]]) -> list[str]:
    """Arguments of the reference that can be given to a candidate neither by name nor by place."""
    kinds, names = [kind for _, kind in found], [name for name, _ in found]
    place = len(found) if Parameter.VAR_POSITIONAL in kinds else sum(kind < Parameter.VAR_POSITIONAL for kind in kinds)
    named = Parameter.VAR_KEYWORD in kinds
    return [
        name
        for index, (name, kind) in enumerate(wanted)
        if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        and not (named or name in names or index < place)
    ]


def call_findings(
    wanted: CallOutput, found: CallOutput, output_dtypes: tuple[torch.dtype, ...], labels: AbstractSet[Label], **how: bool
) -> Iterator[CheckFinding]:
    """Deviations of a call's outputs, as `form_findings`, and of its inputs."""
    yield from form_findings(wanted.described, found.described, output_dtypes, labels, **how)
    if wanted.written and not has_nan(wanted.written):
        if not found.written or not apart(found.written, wanted.written).within(_WRITTEN_ALIKE):
            detail = "the reference writes into its inputs; the call did not, or wrote something else"
            yield CheckFinding.lacking(Reason.INPUT_MUTATED, detail)
    elif not found.inputs_intact and wanted.inputs_intact:
        yield CheckFinding.wrong(Reason.INPUT_MUTATED, "the call changed its inputs")
    if wanted.described.inputs_kept and not found.described.inputs_kept:
        detail = "the call changed its inputs' shape or properties, such as requires_grad"
        yield CheckFinding.wrong(Reason.INPUT_MUTATED, detail)


def form_findings(
    wanted: Described,
    found: Described,
    output_dtypes: tuple[torch.dtype, ...],
    labels: AbstractSet[Label] = frozenset(),
    *,
    strides: bool = True,
    reuses_output: bool = False,
) -> Iterator[CheckFinding]:
    """Deviations of an answer's structure, types and strides, and of whose memory the outputs lie in.

    Args:
        wanted: The reference's answer.
        found: The candidate's.
        output_dtypes: Types of the reference's tensors.
        labels: Labels of the candidate so far.
        strides: True compares strides, as where inputs lie in the task's own layout. Elsewhere an operator may choose its
            output layout.
        reuses_output: True where the reference has returned the memory of an earlier output before.
    """
    if found.strange:
        yield CheckFinding.wrong(Reason.WRONG_TYPE, f"returned {listed(found.strange, 3)}; wanted plain torch.Tensor")
        return
    rounding = [2 * torch.finfo(dtype).eps for dtype in output_dtypes if dtype.is_floating_point]
    alike = _same_structure(found.skeleton, wanted.skeleton, max([_NUMBERS_DIFFER, *rounding]))
    if not alike or len(found.outputs) != len(wanted.outputs):
        shown = "one nested too deeply to be shown"
        with contextlib.suppress(RecursionError):
            shown = str(found.skeleton)[:200]
        detail = f"returned the structure {shown}; wanted {wanted.skeleton}"
        yield CheckFinding.wrong(Reason.WRONG_TYPE, detail)
        return
    for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
        for name, reason in (("shape", Reason.WRONG_SHAPE), ("dtype", Reason.WRONG_DTYPE), ("device", Reason.WRONG_DEVICE)):
            if getattr(mine, name) != getattr(theirs, name):
                yield CheckFinding.wrong(reason, f"returned {name} {getattr(mine, name)}; wanted {getattr(theirs, name)}")
        if set(mine.traits) - set(theirs.traits):
            yield CheckFinding.wrong(Reason.WRONG_TYPE, f"returned a tensor that is {' and '.join(mine.traits)}")
        if strides and not _strides_equal(mine, theirs):
            yield CheckFinding.remark(Label.STRIDES_DIFFER, f"returned strides {mine.stride}; wanted {theirs.stride}")
        extra = set(mine.aliases) - set(theirs.aliases)
        reuses_output |= "earlier output" in theirs.aliases
        if theirs.aliases or reuses_output:
            extra.discard("earlier output")  # memory of its input or state, or kept by the reference as well
        if extra == {"earlier output"}:
            yield overwritten(labels, "an output lies where an earlier one does, which the caller still has")
        elif extra:
            owners = " and ".join(sorted(extra))
            yield CheckFinding.wrong(Reason.OUTPUT_ALIASES, f"an output shares memory with the call's {owners}")


def overwritten(labels: AbstractSet[Label], detail: str) -> CheckFinding:
    """CheckFinding about calls that share the memory of their outputs: a remark where that is a CUDA graph's buffer."""
    if Label.CUDA_GRAPH in labels:
        return CheckFinding.remark(Label.ALIASED_OUTPUT, detail)
    return CheckFinding.wrong(Reason.OUTPUT_OVERWRITTEN, detail)


def held_findings(
    candidate: Side, index: int, wanted: Outputs, allowed: Distance, labels: AbstractSet[Label]
) -> list[CheckFinding]:
    """Deviations of the output of an earlier held call, as it is now, from what it should be.

    A CUDA graph of torch.compile may have overwritten it, and then it cannot be read.
    """
    try:
        now = candidate.recopy(index)
    except WorkerError as failure:
        if failure.reason is not Reason.RUNTIME_ERROR:
            raise
        return [overwritten(labels, f"an earlier output cannot be read after later calls: {failure.detail}")]
    if apart(now, wanted).within(allowed):
        return []
    return [overwritten(labels, "the first call's output was changed by a later call")]


def process_findings(reference: Inspection, seen: Inspection, training: bool) -> Iterator[CheckFinding]:
    """Deviations of a candidate's process after its calls: settings, library functions, and the mode of its module.

    The reference may change the same ones.
    """
    own = changed_settings(reference.before, reference.after)
    changes = {name: how for name, how in changed_settings(seen.before, seen.after).items() if name not in own}
    forbidden = forbidden_changes(changes) + [
        f"{name} was replaced" for name in seen.patched if name not in reference.patched
    ]
    if forbidden:
        yield CheckFinding.wrong(Reason.GLOBAL_STATE_CHANGED, "; ".join(forbidden))
    if seen.training not in (training, reference.training):
        yield CheckFinding.lacking(Reason.MODE_MISMATCH, f"after the calls the module has training={seen.training}")
    for label, names in dynamic_labels(changes).items():
        yield CheckFinding.remark(label, f"process-wide settings were changed: {listed(names)}")


def leak_findings(grown: Mapping[str, int], calls: int) -> Iterator[CheckFinding]:
    """Deviations of what so many calls leave behind each time they are made, by kind."""
    for kind, number in grown.items():
        if kind == "bytes of memory":
            detail = f"its memory grows by {number / calls / 1024:.1f} KiB with each call"
            yield CheckFinding.wrong(Reason.OUT_OF_MEMORY, detail)
        elif kind == "draws":
            detail = "each call draws from the random generators of Python or NumPy, or seeds them or PyTorch's"
            yield CheckFinding.wrong(Reason.GLOBAL_STATE_CHANGED, detail)
        else:
            yield CheckFinding.wrong(Reason.GLOBAL_STATE_CHANGED, f"{calls} calls leave {number} {kind} behind")


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Process-wide settings that differ, and how; those of a group as `group.name`."""
    changes: dict[str, str] = {}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes |= {f"{name}.{inner}": how for inner, how in changed_settings(old, new).items()}
        elif old != new:
            changes[name] = f"{old} -> {new}"
    return changes


def dynamic_labels(changes: Mapping[str, str]) -> dict[Label, list[str]]:
    """Labels that follow from changed settings, each with those settings."""
    names = [name for name in changes if name.partition(".")[0] in _LABELLED]
    lowered = [name for name in names if name == "flags.float32_matmul_precision" and changes[name].startswith("highest ->")]
    return {label: those for label, those in ((Label.GLOBAL_FLAGS, names), (Label.TF32, lowered)) if those}


def forbidden_changes(changes: Mapping[str, str]) -> list[str]:
    """Changed settings that a drop-in must leave alone."""
    return [f"{name}: {how}" for name, how in changes.items() if name.partition(".")[0] not in _LABELLED]


def _same_structure(mine: Any, theirs: Any, allowed: float) -> bool:
    """True for equal skeletons: numbers by their type too, and floats as far as rounding allows."""
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
