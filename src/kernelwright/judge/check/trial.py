"""Brings together what one evaluation needs: task facts, candidate, processes, device gate, and the findings so far."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kernelwright.judge.check.facts import TaskFacts
from kernelwright.judge.check.findings import (
    CheckFinding,
    CheckFindings,
    Demands,
    RejectionError,
    call_findings,
    interface_findings,
    process_findings,
)
from kernelwright.judge.check.oracle import State
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.process import CallBudget, WorkerError, WorkerSpec
from kernelwright.judge.isolation.side import CallOutput, Side
from kernelwright.judge.isolation.workers import Workers
from kernelwright.judge.settings import Settings
from kernelwright.records import Candidate, Label, Reason
from kernelwright.records.lines import sha256_of
from kernelwright.records.models import BASELINE_POLICY

ALONGSIDE = "alongside"
"""Key of the record's checks with why something was not timed beside the candidate, by name."""
_TF32_CAPABILITY = (8, 0)


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
    """Held while this evaluation uses the device, so that other evaluations do not disturb its clocks."""
    budget: CallBudget | None = None
    """Time that the candidate may take; None does not count it."""
    core: int | None = None
    """Processor core on which calls are timed."""
    alongside: Mapping[str, Candidate] = field(default_factory=dict)
    """Stock configurations and other finalists by name, timed beside the candidate; their failures are no verdict."""

    @property
    def reloads_state(self) -> bool:
        """True if the candidate's state has the reference's names, so that weights can be loaded into both."""
        return Label.STATE_DIFFERS not in self.findings.labels

    def leave_out(self, name: str, reason: Reason, detail: str) -> None:
        """Note that something is not timed beside the candidate from now on, and why."""
        self.findings.checks.setdefault(ALONGSIDE, {})[name] = {"reason": reason.value, "detail": detail}

    def is_left_out(self, name: str) -> bool:
        """True if something was left out."""
        return name in self.findings.checks.get(ALONGSIDE, {})

    @property
    def state(self) -> State:
        """State that both modules hold: new weights, or their first ones where their names differ."""
        return self.facts.weights if self.reloads_state else self.facts.oracle.initial_state

    @property
    def lets_cudnn_use_tf32(self) -> bool:
        """True if PyTorch's defaults do, on this device; which of cuDNN's algorithms runs depends on layout and luck.
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
        if (other := self.alongside.get(role)) is not None:
            apart = CheckFindings(Demands(), self.findings.labels)  # what it lacks is no finding about the candidate
            trial = replace(self, findings=apart, candidate=other, budget=None)
            if other.policy != BASELINE_POLICY:
                return trial.start("candidate")
            # A trusted wrapper around the reference.
            return trial._start("baseline", other.source, "ModelNew", kept_as=other.name_alongside or None)
        return self._start(role, self.facts.live.task.source, "Model", kept_as="reference")

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
            self.findings.remark(Label.STATE_DIFFERS, failure.detail)
            return self._start(role, source, class_name, kept_as)
        return side

    def renew(self, side: Side) -> None:
        """Begin anew with a side: its process has died, or may not be asked any more."""
        side.renew()
        self._furnish(side)

    def _furnish(self, side: Side) -> None:
        built = side.build(self.facts.arguments, self.facts.build_seed)
        if side.role != "reference":
            findings = interface_findings(built, self.facts)
            if side.role == "baseline" and (differing := [one for one in findings if one.label is Label.STATE_DIFFERS]):
                raise RejectionError(Reason.STATE_MISMATCH, differing[0].detail)
            self.findings.add(findings)
        if self.reloads_state and self.facts.oracle.initial_state:
            side.load_state(self.facts.weights)

    def check_form(self, reference: CallOutput, answer: CallOutput, *, strides: bool = True) -> None:
        """Keep findings about the form of an answer, beside the reference's on the same inputs; raises RejectionError."""
        found, reuses = self.findings, self.findings.reference_reuses_output
        dtypes = self.facts.output_dtypes
        found.add(call_findings(reference, answer, dtypes, found.labels, strides=strides, reuses_output=reuses))
        found.reference_reuses_output |= any("earlier output" in one.aliases for one in reference.described.outputs)

    def process_findings(self, reference: Side, candidate: Side) -> list[CheckFinding]:
        """Deviations of what a candidate has done to its process and its mode. Changes that the
        reference makes as well are none."""
        with ThreadPoolExecutor(2) as threads:  # to look through all modules takes a while
            theirs, mine = threads.map(operator.methodcaller("inspect"), (reference, candidate))
        return [*process_findings(theirs, mine, self.facts.oracle.training)]
