"""Evaluates candidates: one task, one candidate, one verdict."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TypeVar

import torch

from kernelwright.cores import timing_core
from kernelwright.errors import CrowdedError, DeviceError
from kernelwright.gpu.devices import device_state, has_room_for, resolve_device
from kernelwright.judge.check import guard
from kernelwright.judge.check.check import CheckResult, check_candidate, check_late
from kernelwright.judge.check.examiner import Examiner
from kernelwright.judge.check.facts import measure_task
from kernelwright.judge.check.findings import CheckFinding, CheckFindings, Demands, Failed, RejectionError
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.fork_server import ForkServer
from kernelwright.judge.isolation.gate import DeviceGate, DeviceMemory, DisturbedError
from kernelwright.judge.isolation.process import CallBudget, WorkerError
from kernelwright.judge.isolation.side import Side
from kernelwright.judge.isolation.workers import KEPT, JudgeFolder, Workers, remove_left_folders, require_room
from kernelwright.judge.settings import GIB, Settings
from kernelwright.judge.timing.clocks import CacheFlush
from kernelwright.judge.timing.pairs import PairedTiming, SidesAhead, start_sides
from kernelwright.records import Candidate, Contract, Evaluation, KeptContract, Label, Reason, Task, Verdict
from kernelwright.records.models import with_hint
from kernelwright.records.scoring import Score
from kernelwright.seconds import counted, utc_now
from kernelwright.tasks import LiveTask, bring_to_life, device_is_full, printing_aside
from kernelwright.tasks.source import check_task_source, imported_by, installed

_SPENT_S = 0.01
"""Shortest time that the record mentions."""
_COMPILED = re.compile(r"\bcompile\b|triton|inductor|dynamo")
"""Words of candidates that may need torch.compile's compiler, or a part of it. To import it takes six seconds."""
_SLOW_RATIO, _CALLS = 10.0, 200
"""Ratio above which a candidate's latency need not be known well, and calls that knowing it well takes. Our choice."""
_DISTURBANCES_MAX = 3
"""Disturbances after which a judge no longer looks whether a GPU rests: others use it too. Our choice."""
Progress = Callable[[str], None]
T = TypeVar("T")


class Judge:
    """Evaluates candidates on a device (`auto`, `cpu`, `cuda` or `cuda:N`) and tells `progress` in words what it is doing.

    Keep one for many evaluations: it holds the process that forks workers. One evaluation at a time in a process, whatever
    its threads: torch's default dtype and random generators are the process's. A `fork_server` started before is the
    judge's from now on.

    Raises:
        DeviceError: there is no such device, or its memory is full.
    """

    def __init__(
        self,
        device: str = "auto",
        settings: Settings | None = None,
        progress: Progress | None = None,
        *,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.device = resolve_device(device)
        remove_left_folders()
        self.core = timing_core(self.device)
        """Core of the processor on which calls are timed; None where workers stay where they are."""
        self.settings = settings or Settings()
        self.progress = progress or (lambda text: None)
        # Before anything secret exists here: workers are forks of a process that never saw it.
        self.fork_server = fork_server or ForkServer()
        self.fork_server.keep_off(self.core)
        self.memory = DeviceMemory(self.device, self.release_idle)
        """Share of the device's memory, by which evaluations wait for one that needs all of it."""
        keep = KEPT if self.device.type == "cuda" else 0
        self.workers = Workers(self.fork_server, keep, lambda kind: has_room_for(kind, self.device))
        sandbox.hide_memory()
        try:
            self.flush = CacheFlush(self.device)
        except RuntimeError as error:
            self.close()
            if not device_is_full(error):
                raise
            raise CrowdedError(
                f"Wanted a judge on {self.device}; others have filled the GPU's memory: {str(error).splitlines()[0]} "
                "Let fewer programs share it."
            ) from error
        self._live: dict[str, LiveTask] = {}
        self._imported: set[str] = set()
        """Modules that were imported for workers, and kinds of device whose compiler was."""
        self.disturbances = 0
        """Attempts that were given up because a GPU was at work for somebody else."""

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def release_idle(self) -> None:
        """End the processes that wait for another task, and give back what failures left: somebody wants the memory."""
        self.workers.release_idle()
        gc.collect()  # an exception that came through a thread's future is a cycle, with all tensors of its evaluation
        torch.cuda.empty_cache()

    def close(self) -> None:
        """End the worker processes."""
        self.workers.close()
        self.fork_server.close()

    def evaluate(
        self,
        task: Task,
        candidate: Candidate,
        *,
        settings: Settings | None = None,
        alone: bool | None = None,
        alongside: Sequence[Candidate] = (),
    ) -> Evaluation:
        """Judge one candidate of a task.

        Args:
            settings: Settings in place of the judge's own.
            alone: Whether to wait until the GPU's memory is for it alone. By default only where sharing does not suffice.
            alongside: Stock configurations (wrappers of the task's module, of the policy `baseline`) and other finalists,
                timed in the same process triples. They decide no verdict, and are left out where they fail, or where memory
                does not suffice beside others.

        Raises:
            TaskError: the reference itself does not work.
            CrowdedError: it does not suffice, or others waited too long for its kernels, and `alone` is False.
            InfrastructureError: this machine failed. A candidate's failure never raises: it is a verdict.
        """
        started = time.monotonic()
        began = utc_now()
        settings = settings or self.settings
        attempt = functools.partial(self._found, task, candidate, settings, alongside)
        found = self.with_memory(attempt, CheckFindings.ran_out, alone)
        return record_of(found, task, candidate, str(self.device), began, time.monotonic() - started, found.kept())

    def with_memory(self, attempt: Callable[[], T], ran_out: Callable[[T], bool], alone: bool | None) -> T:
        """Try beside other evaluations first, then alone where they had the memory, or waited for its kernels too long.

        Raises:
            CrowdedError: it came to that, and `alone` is False.
            DeviceError: memory does not suffice alone either.
        """
        if self.device.type != "cuda":
            return attempt()
        why: str | None = None
        while not alone and why is None:
            try:
                with self.memory():
                    found = attempt()
                    if not ran_out(found):
                        return found
                why = "found too little memory."
            except DisturbedError:
                self.disturbances += 1  # of many, the others are no judges, and nobody looks any more
            except DeviceError as error:
                why = str(error)
        if alone is False:
            raise CrowdedError(f"Wanted {self.device} beside other evaluations; {why} Try it alone.")
        with self.memory(alone=True):
            torch.cuda.reset_peak_memory_stats(self.device)
            try:
                found = attempt()
            except DeviceError as error:
                held, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
                took = f"The judge's own tensors took {held / GIB:.1f} GiB at most, of {reserved / GIB:.1f} reserved."
                raise DeviceError(f"{error} {took}") from error
            if ran_out(found):  # a candidate is not to blame for a device full of the judge's own tensors
                total_bytes = torch.cuda.get_device_properties(self.device).total_memory
                if (own_bytes := torch.cuda.max_memory_reserved(self.device)) > total_bytes / 2:
                    raise DeviceError(
                        f"Wanted at least half of {self.device}'s {total_bytes / GIB:.1f} GiB for the reference and the "
                        f"candidate; the judge itself took {own_bytes / GIB:.1f} GiB. The task is too large for this GPU."
                    )
            return found

    def _found(self, task: Task, candidate: Candidate, settings: Settings, alongside: Sequence[Candidate]) -> CheckFindings:
        self.workers.spent_s.clear()
        reading = guard.read_candidate(candidate, task, settings.forbid)
        findings = CheckFindings(Demands.of(settings), reading.labels)
        findings.checks["advice"] = list(reading.advice)
        findings.checks |= settings.model_dump(include={"strict_fp32", "tf32_products"})
        if any(_COMPILED.search(one.source) for one in (candidate, *alongside)):
            self.import_compiler()
        with self.evaluation_folder(task) as directory:
            try:
                with counted(findings.phases_s, "task"):
                    self._live_task(task)
                try:
                    guard.parse(candidate.source)
                except guard.PARSE_ERRORS as error:
                    raise RejectionError(Reason.SYNTAX_ERROR, f"{type(error).__name__}: {error}".strip(": ")) from error
                with counted(findings.phases_s, "facts"):
                    trial = self.trial(task, candidate, directory, settings, findings, alongside)
                if self.memory.alone:  # the candidate may lack the very memory that the others would take
                    for name in trial.alongside:
                        trial.leave_out(name, Reason.OUT_OF_MEMORY, "too little of the GPU's memory was left")
                self._examine(trial)
            except (RejectionError, WorkerError) as failure:
                findings.failure = Failed(failure.reason, failure.detail)
        if findings.failure is not None:
            require_room()
        if findings.missing:
            ended = [] if findings.failure is None else [findings.failure]
            findings.checks["missing"] = {reason.value: detail for reason, detail in (*findings.missing.items(), *ended)}
        spent_s = self.workers.spent_s
        findings.checks["spent_s"] = {name: round(spent_s[name], 3) for name in sorted(spent_s) if spent_s[name] >= _SPENT_S}
        findings.checks["phases_s"] = {name: round(seconds, 3) for name, seconds in findings.phases_s.items()}
        return findings

    @contextlib.contextmanager
    def evaluation_folder(self, task: Task) -> Iterator[Path]:
        """A directory of one evaluation; whatever it used is given back afterwards."""
        folder, threads = JudgeFolder(), torch.get_num_threads()
        try:
            if self.device.type == "cpu":
                torch.set_num_threads(1)  # the parent's own thread pool must not spin beside the worker that is being timed
            with printing_aside():
                yield folder.path
        except RuntimeError as error:
            if not device_is_full(error):
                raise
            raise DeviceError(
                f"Wanted to judge a candidate of {task.id}; the judge's own share of the GPU's memory ran out: "
                f"{str(error).splitlines()[0]} Let fewer judges share the GPU."
            ) from error
        finally:
            torch.set_num_threads(threads)
            folder.remove()
            torch.cuda.empty_cache()

    def _examine(self, trial: Trial) -> None:
        settings, findings = trial.settings, trial.findings
        findings.add(CheckFinding.remark(label, "by its source") for label in sorted(findings.labels))
        self.progress("checking")
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: findings.checks.update(device_s=trial.gate.held_s, waited_s=trial.gate.waited_s))
            with counted(findings.phases_s, "check"):
                # An evaluation that is alone on the device is so because memory is scarce.
                is_on = settings.timed and settings.fresh_processes and not self.memory.alone
                ahead = stack.enter_context(
                    contextlib.closing(SidesAhead(trial, is_on=is_on and self.device.type == "cuda"))
                )
                started = start_sides(trial, ("reference", "candidate"))
                sides = [started[role] for role in ("reference", "candidate")]
                for side in sides:
                    stack.callback(ahead.end, side)
                examiner = Examiner(trial, *sides)
                check = check_candidate(examiner, functools.partial(ahead.begin, settings.processes_min))
            torch.cuda.empty_cache()  # float64 truths are large, and other judges share the device
            if findings.rejection is not None:
                # Without a number to publish, one process triple tells whether `kernelbench` is kept in timed calls too.
                once = settings.model_copy(update={"processes_min": 1, "processes_max": 1})
                trial = replace(trial, settings=once, alongside={})
            if settings.timed and (why := slowness(sides[0], sides[1], settings.budget_s)):
                findings.checks["settled"] = f"after few calls: {why}"
                trial = replace(trial, settings=trial.settings.brief)
            if not settings.timed:
                findings.remark(Label.NOT_RETIMED, "its time was not asked for")
            elif settings.fresh_processes:
                for side in sides:
                    side.release_idle()
                keeps_state = trial.facts.stateful or trial.facts.has_buffers
                if not keeps_state and (self.memory.alone or trial.facts.shapes.is_large):
                    sides[0].worker.discard()  # its memory is wanted; a new one does for the late check
                sides[1].worker.pause()
                findings.score = self._time(trial, check, {}, ahead)
                sides[1].worker.resume()
            else:
                findings.score = self._time(trial, check, dict(zip(("reference", "candidate"), sides, strict=True)))
            if settings.thorough:
                with counted(findings.phases_s, "late check"):
                    if sides[0].worker.ended:
                        trial.renew(sides[0])
                    check_late(examiner)

    def trial(
        self,
        task: Task,
        candidate: Candidate,
        directory: Path,
        settings: Settings,
        findings: CheckFindings,
        alongside: Sequence[Candidate] = (),
    ) -> Trial:
        """A candidate beside its reference, in the directory of an `evaluation_folder`.

        Raises:
            TaskError: the reference does not work.
        """
        looks = self.disturbances < _DISTURBANCES_MAX and not self.memory.alone  # where nobody else is judged
        gate = DeviceGate(self.device, settings.unstoppable_limit_s if looks else None)
        with gate(shared=True):  # measures nothing
            facts = measure_task(self._live_task(task), self.device)
        self._import_for_workers([type(module).__module__ for module in facts.oracle.model.modules()])
        if self.device.type == "cuda":
            facts.oracle.give_way = gate.give_way
        return Trial(
            facts=facts,
            candidate=candidate,
            settings=settings,
            findings=findings,
            workers=self.workers,
            directory=directory,
            gate=gate,
            budget=CallBudget(settings.budget_s),
            core=self.core,
            alongside={other.name_alongside: other for other in alongside},
        )

    def _time(self, trial: Trial, check: CheckResult, checked: Mapping[str, Side], ahead: SidesAhead | None = None) -> Score:
        self.progress("timing")
        checks = trial.findings.checks
        checks["device_before"] = device_state(self.device)
        score, processes = PairedTiming(trial, check, self.flush, self.progress, ahead=ahead).run(checked)
        checks["device_after"] = device_state(self.device)
        checks["clocks"] = {"processes": processes}
        return score

    def _live_task(self, task: Task) -> LiveTask:
        if task.sha256 not in self._live:
            check_task_source(task.source, task.origin or task.id)
            self._import_for_workers(imported_by(task.source))
            self._live = {task.sha256: bring_to_life(task)}
        return self._live[task.sha256]

    def import_compiler(self) -> None:
        """Import torch.compile's compiler for a GPU's workers, once: each process that needs it would import it anew."""
        if self.device.type == "cuda" and self.device.type not in self._imported:
            self._imported.add(self.device.type)
            self.workers.release_idle()
            self.fork_server.import_compiler(self.device.type)

    def _import_for_workers(self, names: Collection[str]) -> None:
        """Have libraries imported once for all workers: that can take seconds in each."""
        if new := [name for name in installed(names) if name not in self._imported]:
            self._imported.update(new)
            self.workers.release_idle()
            self.fork_server.import_modules(new)


def record_of(
    findings: CheckFindings,
    task: Task,
    candidate: Candidate,
    device: str,
    began: str,
    elapsed_s: float,
    contracts: dict[Contract, KeptContract] | None = None,
) -> Evaluation:
    """The record of an evaluation that began then, took so long, and ended with these findings and answers to contracts."""
    decides = findings.decisive
    timed = {} if findings.score is None or decides is not None else findings.score.recorded
    return Evaluation(
        task=task.id,
        task_sha256=task.sha256,
        candidate_sha256=candidate.sha256,
        verdict=Verdict.ACCEPTED if decides is None else Verdict.REJECTED,
        reason=None if decides is None else decides.reason,
        detail="" if decides is None else with_hint(decides.reason, decides.detail.strip()),
        contract=findings.demands.contract,
        contracts=contracts,
        labels=tuple(sorted(findings.labels)),
        device=device,
        **candidate.model_dump(include={"policy", "techniques", "passes", "parent", "source"}),
        checks=findings.checks,
        started=began,
        elapsed_s=round(elapsed_s, 3),
        **timed,
    )


def slowness(reference: Side, candidate: Side, budget_s: float) -> str:
    """Why many timed calls of a candidate are not worth their time, by the calls of its check; empty if they are."""
    theirs_us, mine_us = (median(side.calls_us) for side in (reference, candidate))
    if mine_us >= _SLOW_RATIO * theirs_us:
        return f"in its check it took {mine_us / theirs_us:.0f} times as long as the reference"
    if (mine_us - theirs_us) * _CALLS > budget_s * 1e6:
        return f"each of them takes {(mine_us - theirs_us) / 1e6:.1f} s longer than the reference's"
    return ""
