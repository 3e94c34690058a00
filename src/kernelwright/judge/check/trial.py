"""Brings together what one evaluation needs: task facts, candidate, processes, device gate, and what was found so far."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernelwright.errors import InternalError, listed
from kernelwright.judge.check.facts import TaskFacts
from kernelwright.judge.check.oracle import OutOfDomainError, State
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.process import CallBudget, WorkerError, WorkerSpec
from kernelwright.judge.isolation.replies import BuiltModule
from kernelwright.judge.isolation.side import Side
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import DROP_IN_LABELS, Settings
from kernelwright.records import Candidate, Contract, KeptContract, Label, Reason
from kernelwright.records.canonical import sha256_of
from kernelwright.records.scoring import Score

PAIRED_BASELINE = "rival"
"""Role of a stock baseline that is timed in the same process triples, as records name it."""
_TF32_CAPABILITY = (8, 0)
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


class CheckFindings:
    """Labels and measurements of one evaluation. They outlive a rejection, since the record shows them too."""

    def __init__(
        self, forbidden: Set[Label], labels: Set[Label] = frozenset(), contract: Contract = Contract.DROP_IN
    ) -> None:
        self._forbidden = forbidden
        self.contract = contract
        self.labels = set(labels)
        self.checks: dict[str, Any] = {}
        self.missing: dict[Reason, str] = {}
        """What a drop-in keeps and this candidate does not, though it may keep the contract `kernelbench`; in words."""
        self.rejection: Failed | None = None
        """The first of these that decides the verdict."""
        self.failure: Failed | None = None
        """Failure for which the check or timing broke off; it keeps neither contract."""
        self.score: Score | None = None
        self.reference_reuses_output = False
        """Whether an output of the reference was seen in the memory of an earlier one."""
        self.phases_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that each part took; `docs/record-format.md` says which of them include waiting for the device."""

    def label(self, label: Label, detail: str) -> None:
        """Attach a label, or reject where the settings forbid it: at once, unless `kernelbench` may still be kept."""
        if label in DROP_IN_LABELS:
            self.miss(_LABEL_REASONS[label], f"{label}: {detail}", label)
            return
        if label in self._forbidden:
            raise RejectionError(_LABEL_REASONS.get(label, Reason.FORBIDDEN_LABEL), f"{label}: {detail}")
        self.labels.add(label)

    def miss(self, reason: Reason, detail: str, label: Label | None = None) -> None:
        """Note what makes it no drop-in. The check goes on, since one evaluation answers both contracts."""
        self.missing.setdefault(reason, detail)
        if label:
            self.labels.add(label)
        decides = label in self._forbidden if label else self.contract is Contract.DROP_IN
        if decides and self.rejection is None:
            self.rejection = Failed(reason, detail)

    def excuse(self, failure: RejectionError | WorkerError, reason: Reason, refusal: Label | None = None) -> None:
        """Note a failure in what only a drop-in is asked, as `miss`; raise it where it is more than that.

        `refusal` is the label of a candidate that raises an error of its own; one that crashes is excused too.
        """
        crashed = failure.reason is Reason.CRASHED or "CUDA error" in failure.detail
        if failure.reason not in _EXCUSABLE and not (refusal and crashed):
            raise failure
        refuses = failure.reason is Reason.RUNTIME_ERROR and not crashed
        self.miss(reason, f"{failure.reason}: {failure.detail}", refusal if refuses else None)

    def kept(self) -> dict[Contract, KeptContract]:
        """Answers to both contracts, after a check that ended with its failure."""
        failed = () if self.failure is None else (self.failure.reason,)
        missing = {Contract.DROP_IN: (*dict.fromkeys((*self.missing, *failed)),), Contract.KERNELBENCH: failed}
        return {contract: KeptContract(kept=not reasons, missing=reasons) for contract, reasons in missing.items()}

    @contextlib.contextmanager
    def skipping(self, input_set: str) -> Iterator[None]:
        """Leave out the rest of a block where an input set lies outside the reference's domain, and note why."""
        try:
            yield
        except OutOfDomainError as error:
            self.checks.setdefault("skipped", {})[input_set] = str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate beside its reference."""

    facts: TaskFacts
    candidate: Candidate
    settings: Settings
    findings: CheckFindings
    workers: Workers
    directory: Path
    """Folder of this evaluation's files."""
    gate: DeviceGate
    """Held while this evaluation uses the device, so that evaluations beside it do not disturb the clocks."""
    budget: CallBudget | None = None
    """Time that the candidate may take; None does not count it."""
    core: int | None = None
    """Processor core on which calls are timed."""
    paired_baseline: Candidate | None = None
    """Trusted wrapper of the task's own module, timed beside the candidate; its failure is no verdict."""

    @property
    def reloads_state(self) -> bool:
        """Whether the candidate's state has the reference's names, so that weights can be loaded into both."""
        return Label.STATE_DIFFERS not in self.findings.labels

    @property
    def has_paired_baseline(self) -> bool:
        """Whether a paired baseline is to be timed, and has not failed."""
        return self.paired_baseline is not None and PAIRED_BASELINE not in self.findings.checks

    @property
    def state(self) -> State:
        """State that both modules hold: new weights, or their first ones where their names differ."""
        return self.facts.weights if self.reloads_state else self.facts.oracle.initial_state

    @property
    def lets_cudnn_use_tf32(self) -> bool:
        """Whether PyTorch's defaults do, on this device; which of cuDNN's algorithms runs depends on layout and luck.
        There products may use it where the settings allow it."""
        return (
            self.facts.device.type == "cuda"
            and not self.settings.strict_fp32
            and torch.cuda.get_device_capability(self.facts.device) >= _TF32_CAPABILITY
        )

    def start(self, role: str) -> Side:
        """A fresh worker of one side, built and with weights loaded.

        Raises:
            RejectionError, WorkerError: the candidate could not be built or is no drop-in.
            TaskError: the reference could not.
        """
        if role == "candidate":
            return self._start(role, self.candidate.source, "ModelNew")
        if role == PAIRED_BASELINE and self.paired_baseline is not None:
            # What it lacks is no finding about the candidate.
            return replace(self, findings=CheckFindings(frozenset(), self.findings.labels)).start_baseline(
                self.paired_baseline
            )
        return self._start(role, self.facts.live.task.source, "Model", kept_as="reference")

    def start_baseline(self, baseline: Candidate) -> Side:
        """A fresh worker of a trusted wrapper around the reference; raises as `start`."""
        return self._start("baseline", baseline.source, "ModelNew", kept_as="-".join(baseline.techniques) or None)

    def _start(self, role: str, source: str, class_name: str, kept_as: str | None = None) -> Side:
        facts = self.facts
        spec = WorkerSpec(
            role=role,
            source=source,
            class_name=class_name,
            device=str(facts.device),
            directory=self.directory,
            build=self.directory / f"build-{sha256_of(kept_as or source)[:12]}",
            arena_bytes=facts.shapes.arena_bytes,
            gate=self.gate,
            budget=self.budget,
            kept_as=kept_as,
        )
        side = Side(self.workers, self.settings, facts.shapes, spec)
        try:
            self._furnish(side)
        except BaseException as failure:
            side.close()
            if role != "candidate" or not isinstance(failure, WorkerError) or failure.reason is not Reason.STATE_MISMATCH:
                raise
            # What it has loaded of them, nobody knows. A new one keeps those it is built with.
            self.findings.label(Label.STATE_DIFFERS, failure.detail)
            return self._start(role, source, class_name, kept_as)
        return side

    def renew(self, side: Side) -> None:
        """Begin anew with a side: its process has died, or may not be asked any more."""
        side.renew()
        self._furnish(side)

    def _furnish(self, side: Side) -> None:
        built = side.build(self.facts.arguments, self.facts.build_seed)
        if side.role != "reference":
            self._check_interface(built, side.role)
        if self.reloads_state and self.facts.oracle.initial_state:
            side.load_state(self.facts.weights)

    def _check_interface(self, built: BuiltModule, role: str) -> None:
        training = self.facts.oracle.training
        if built.missing is not None:
            raise RejectionError(Reason.NO_MODEL_NEW, "the module defines no class ModelNew that is a torch.nn.Module")
        if built.training != training:
            self.findings.miss(Reason.MODE_MISMATCH, f"built with training={built.training}, the reference with {training}")
        wanted = {key: (spec.dtype, spec.shape) for key, spec in self.facts.shapes.state}
        found = {key: (dtype, shape) for key, dtype, shape in built.state}
        if wanted != found:
            missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
            other = sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
            parts = {"missing": missing, "unexpected": extra, "other shape or dtype": other}
            detail = "state_dict: " + "; ".join(f"{what} {listed(map(repr, names))}" for what, names in parts.items())
            if role == "baseline":
                raise RejectionError(Reason.STATE_MISMATCH, detail)
            self.findings.label(Label.STATE_DIFFERS, detail)
