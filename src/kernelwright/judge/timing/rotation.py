"""Measures the baselines of a task without a candidate: every side answers every input, in random order.

Where a candidate is measured for the last time, they are timed beside it (`pairs`). Here one worker of each baseline serves
the whole measurement. Nobody attacks: the baselines are this package's own wrappers, so the inner clock is believed.

No candidate's code runs here, and no candidate is accepted by it. It belongs to the trusted part all the same: the ratios
to stock baselines that a run publishes are its numbers.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from kernelwright.errors import CrowdedError, DeviceError
from kernelwright.judge.check import guard
from kernelwright.judge.check.compare import Distance
from kernelwright.judge.check.findings import CheckFindings, Demands, Failed, RejectionError
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.process import WorkerError, on_core
from kernelwright.judge.isolation.side import SLOTS, CallOutput, Side
from kernelwright.judge.judge import Judge, record_of
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing.answers import TOLERANCE, LooseAnswers
from kernelwright.judge.timing.clocks import CacheFlush
from kernelwright.judge.timing.triple import BLOCKS_MAX, repeats_before
from kernelwright.records import Candidate, Evaluation, Reason, Scoring, Task, TimingBlock
from kernelwright.records.intervals import MISS_PROBABILITY
from kernelwright.records.scoring import Score, score, whole_ns
from kernelwright.seconds import utc_now

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rotated:
    """One baseline's latencies beside the reference's, on the same inputs."""

    score: Score
    allowed: Distance = TOLERANCE
    """Distance allowed between its answers and eager's."""


def rotate(
    judge: Judge,
    task: Task,
    baselines: Sequence[Candidate],
    *,
    settings: Settings | None = None,
    alone: bool | None = None,
) -> list[Evaluation]:
    """Measure wrappers of the task's own module, all in one rotation with it; none of them is checked as a drop-in.

    Where a GPU's memory does not suffice for all of them they are measured in two rotations, and so on; each record says
    how many were in its own. One process of each side answers `blocks` rounds.

    Args:
        judge: Whose device, workers and settings are used.
        task: The task whose module they wrap.
        baselines: At least one, from a trusted policy. Those with the same techniques are of one kind: on a GPU a
            process that has served one of them may serve another.
        settings: Settings in place of the judge's own.
        alone: As for `Judge.evaluate`.

    Raises:
        TaskError: the reference itself does not work.
        CrowdedError: as `Judge.evaluate`.
        InfrastructureError: this machine failed.
    """
    started = time.monotonic()
    began = utc_now()
    settings = settings or judge.settings

    device: dict[str, float] = {}
    attempt = functools.partial(_attempt, judge, task, baselines, settings, device)
    found = None
    try:
        found = judge.with_memory(attempt, _ran_out, alone)
    except CrowdedError:
        raise
    except DeviceError:
        if len(baselines) == 1:
            raise
    if found is None or (_ran_out(found) and len(baselines) > 1):
        # Six modules of one task may not fit where three do.
        middle = len(baselines) // 2
        return [
            record
            for part in (baselines[:middle], baselines[middle:])
            for record in rotate(judge, task, part, settings=settings, alone=alone)
        ]
    records = []
    for baseline in baselines:
        one = found[baseline.sha256]
        findings = CheckFindings(Demands(), guard.read_candidate(baseline, task).labels)
        if isinstance(one, Rotated):
            findings.score = one.score
            findings.checks["allowed"] = one.allowed.to_json()
        else:
            findings.failure = one
        findings.checks |= {"rotation": len(baselines), **device}
        findings.checks |= settings.model_dump(include={"strict_fp32", "tf32_products"})
        records.append(record_of(findings, task, baseline, str(judge.device), began, time.monotonic() - started))
    return records


def _attempt(
    judge: Judge, task: Task, baselines: Sequence[Candidate], settings: Settings, device: dict[str, float]
) -> dict[str, Rotated | Failed]:
    """Latencies or failures by hash; `device` gets the seconds for which it was held and waited for."""
    with judge.evaluation_folder(task) as directory:
        trial = judge.trial(task, baselines[0], directory, settings, CheckFindings(Demands()))
        try:
            return measure(trial, baselines, judge.flush)
        finally:
            device.update(device_s=trial.gate.held_s, waited_s=trial.gate.waited_s)


def _ran_out(found: dict[str, Rotated | Failed]) -> bool:
    return any(not isinstance(one, Rotated) and one.reason is Reason.OUT_OF_MEMORY for one in found.values())


def measure(trial: Trial, baselines: Sequence[Candidate], flush: CacheFlush) -> dict[str, Rotated | Failed]:
    """Time all of them together; returns latencies or a failure by their hashes.

    `settings.blocks` is the least number of rounds, two inputs each; short ones go on for `settings.triple_s` for every
    three sides, as in `PairedTiming`. The trial's candidate is not used.

    Raises:
        TaskError: the reference failed.
    """
    found: dict[str, Rotated | Failed] = {}
    reference = trial.start("reference")
    sides: dict[str, Side] = {}
    try:
        with ThreadPoolExecutor(max(1, len(baselines))) as threads:
            starts = {baseline.sha256: threads.submit(_or_failed, trial.start_baseline, baseline) for baseline in baselines}
            for name, start in starts.items():
                started = start.result()
                if isinstance(started, Failed):
                    found[name] = started
                else:
                    sides[name] = started
        rotation = RotatedCalls(trial, reference, sides, found, flush)
        with trial.gate(shared=True):
            rotation.first_calls()
        with on_core(trial.core, (side.worker for side in (reference, *sides.values()))), trial.gate():
            for _ in range(trial.settings.warmup_calls):
                rotation.round(keep=False)
            start_s, done, long_s = time.perf_counter(), 0, trial.settings.triple_s * (1 + len(sides)) / 3
            while done < trial.settings.blocks or (time.perf_counter() - start_s < long_s and done < BLOCKS_MAX):
                rotation.round(keep=True)
                done += 1
        return found | {name: rotation.result(name) for name in sides if name not in found}
    finally:
        for side in (reference, *sides.values()):
            side.close()


def _or_failed(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | Failed:
    """Return what a call returns, or the reason for which it failed.

    The exception itself may not be kept: its traceback holds the tensors of every function that it went through.
    """
    try:
        return call(*args, **options)
    except (RejectionError, WorkerError) as failure:
        return Failed(failure.reason, failure.detail)


class RotatedCalls:
    """Calls of one set of workers. A side that fails drops out; the others go on."""

    def __init__(
        self,
        trial: Trial,
        reference: Side,
        sides: dict[str, Side],
        failures: dict[str, Rotated | Failed],
        flush: CacheFlush,
    ) -> None:
        self._trial = trial
        self._reference = reference
        self._sides = sides
        self._failures = failures
        self._flush = flush
        self._answers = LooseAnswers(trial)
        self._blocks: dict[str, list[TimingBlock]] = {name: [] for name in sides}
        """One for each round that is kept: latencies on its two inputs."""

    @property
    def _running(self) -> list[str]:
        return [name for name in self._sides if name not in self._failures]

    def first_calls(self) -> None:
        """The calls in which compilers work, all at once."""
        inputs, seed = self._trial.facts.draw(), self._trial.facts.call_seed()
        wanted = self._reference.call(self._reference.place(inputs, slot=0), seed=seed)
        names = self._running
        layouts = {name: self._sides[name].place(inputs, slot=0) for name in names}
        with ThreadPoolExecutor(max(1, len(names))) as threads:
            calls = {
                name: threads.submit(_or_failed, self._sides[name].call, layout, seed=seed)
                for name, layout in layouts.items()
            }
            for name, call in calls.items():
                self._drop_unless_right(name, call.result(), wanted, inputs)

    def round(self, *, keep: bool) -> None:
        """Every side on one fresh input in random order, and in the mirrored order on another."""
        order = ["", *self._running]  # "" is the reference
        random.shuffle(order)
        first, second = self._input(order), self._input(order[::-1])
        for name in self._running:
            if keep:
                theirs, mine = whole_ns((first[""], second[""])), whole_ns((first[name], second[name]))
                self._blocks[name].append(TimingBlock(process=0, reference_us=theirs, candidate_us=mine))

    def _input(self, order: list[str]) -> dict[str, float]:
        inputs, seed, slot = self._trial.facts.draw(), self._trial.facts.call_seed(), random.randrange(SLOTS)
        answers: dict[str, CallOutput] = {}
        repeats = repeats_before(self._trial.facts.device, self._reference.latency_us)
        for name in order:
            if name in self._failures:
                continue
            side = self._sides[name] if name else self._reference
            answer = _or_failed(side.timed_call, inputs, slot, self._flush, seed=seed, repeats=repeats)
            if isinstance(answer, Failed):
                self._failures[name] = answer
            else:
                answers[name] = answer
        for name, answer in answers.items():
            self._drop_unless_right(name, answer, answers[""], inputs)
        return {name: answer.clocks.inner_us for name, answer in answers.items()}

    def _drop_unless_right(self, name: str, answer: CallOutput | Failed, wanted: CallOutput, inputs: list[Any]) -> None:
        """Have a side drop out whose call failed, or whose answer is wrong."""
        failed = answer if isinstance(answer, Failed) else self._answers.failure(answer, wanted, inputs)
        if failed is not None:
            self._failures[name] = failed

    def result(self, name: str) -> Rotated:
        """Latencies of one baseline over all rounds."""
        return Rotated(score(self._blocks[name], (), Scoring(miss_probability=MISS_PROBABILITY)), self._answers.allowed)
