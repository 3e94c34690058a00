"""Collects what checks find about a candidate, and decides by its contract what that means.

A check returns findings or raises: it never asks what the settings allow. `Demands` alone says which findings end an
examination and which decide the verdict.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, NamedTuple

from kernelwright.errors import InternalError
from kernelwright.judge.check.oracle import OutOfDomainError
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.settings import DROP_IN_LABELS, Settings
from kernelwright.records import Contract, KeptContract, Label, Reason
from kernelwright.records.scoring import Score

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
    def skipping(self, input_set: str) -> Iterator[None]:
        """Leave out the rest of a block where an input set lies outside the reference's domain, and note why."""
        try:
            yield
        except OutOfDomainError as error:
            self.checks.setdefault("skipped", {})[input_set] = str(error)
