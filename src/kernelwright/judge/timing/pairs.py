"""Times a candidate against its reference: paired, randomised, in fresh processes, on inputs that no worker has seen.

One *process triple* is a reference, a candidate and a second reference (for the A/A noise floor), all fresh. In a final
the stock configurations and other finalists join them (`triple`); after the first triple only those that are near the
front. Triples are added until the interval is narrow, or processes or time run out.

Two clocks watch each call. The inner one (CUDA events, or the worker's monotonic clock) excludes the harness but lives
in the candidate's process; the outer one is the parent's. Time hidden from the inner clock is charged to the candidate,
and a large excess rejects (`clocks`, `kernelwright.records.scoring`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from statistics import median

from kernelwright.errors import DeviceError, KernelwrightError
from kernelwright.judge.check.check import CheckResult
from kernelwright.judge.check.findings import CheckFinding, RejectionError
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.process import WorkerError, on_core
from kernelwright.judge.isolation.side import LARGE_BYTES, Side
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing import clocks
from kernelwright.judge.timing.clocks import CacheFlush, TripleClocks
from kernelwright.judge.timing.triple import SIDES, ProcessTriple, forgiving
from kernelwright.records import Candidate, Label, Reason, Scoring, TimingBlock
from kernelwright.records.decisions import OVERWRITING
from kernelwright.records.improvement import clears_noise_floor
from kernelwright.records.intervals import MISS_PROBABILITY, early_miss_probability
from kernelwright.records.models import BASELINE_POLICY
from kernelwright.records.scoring import Score, score
from kernelwright.seconds import counted
from kernelwright.tasks.input_sets import InputSet

_SECOND_CHANCES = 2
"""Further process triples for a candidate whose clocks disagree."""
ALONE_S = 0.4
"""For so long warming up and blocks go on once the device is theirs. To get it is to have others stop their workers, and to
wait for what their judges do themselves. When it was to wait until all others were out, a wait for each tenth of a second
took 12 of 33 s beside three other judges (results/2026-11-22-judge-throughput-2-h200). Our choice."""
_LONG_S = 10.0
"""Once timing has had the device for so long, no process beyond the least is begun. Without it a task of 22 ms took half a
minute on two cores; our choice."""
_FURTHER_SHARE = 0.25
"""Share of the blocks beyond the least number after which input sets of the check are asked. Our choice."""
_WIDE = 2.0
"""Width of an interval, in those at which timing ends, from which another process triple starts early. Our choice."""
_PROCESSES_TO_BE_SURE, _PROCESSES_TO_SETTLE = 3, 2
_NEAR = 1.1
"""Latency, in multiples of the fastest stock configuration's or, of a finalist, of the candidate's, up to which something is
timed beside the candidate after the first process triple. Our choice."""


class PairedTiming:
    """Process triples of one candidate, until the interval is narrow or tells enough, or processes or time run out.

    Each is a `triple_kind` of its own.
    """

    def __init__(
        self,
        trial: Trial,
        check: CheckResult,
        flush: CacheFlush,
        progress: Callable[[str], None] | None = None,
        triple_kind: type[ProcessTriple] = ProcessTriple,
        ahead: SidesAhead | None = None,
    ) -> None:
        self._trial = trial
        self._check = check
        self._flush = flush
        self._progress = progress
        self._triple_kind = triple_kind
        self._ahead = ahead or SidesAhead(trial, is_on=False)
        self._following = 0
        """Number of process triples that are likely to follow the present one."""
        found = trial.findings.checks.get("sets", {})
        telling = [one for one in check.tolerances if found.get(one.name, {}).get("calibrated")]
        self._odd = OddInputs([*check.tolerances], trial.settings, telling)
        self._alongside = [*trial.alongside]
        """Names of what is timed beside the candidate in the next triple."""

    def run(self, checked: Mapping[str, Side] | None = None) -> tuple[Score, list[dict[str, float]]]:
        """Measure; returns the score, and a summary of the clocks of each process triple, microseconds.

        `checked` are sides by name that the first triple uses and that stay open.

        Raises:
            RejectionError, WorkerError: the candidate misbehaved while timed.
        """
        trial, settings = self._trial, self._trial.settings
        triples: list[TripleClocks] = []
        left, early = MISS_PROBABILITY, early_miss_probability(settings.processes_min, settings.processes_max)
        # A truth in float64 can take longer than all timed calls: one process triple has it, which nobody knows before.
        truth_at = random.randrange(settings.processes_min)
        before_s, found = trial.gate.held_s, None
        while True:
            given = {} if triples or checked is None else checked
            spent = False
            # The least number follows whatever is found, and all where the interval is wide, most likely.
            wide = found is not None and found.speedup.half_width > _WIDE * settings.target_half_width
            most = settings.processes_max if wide and not settings.until_certain else settings.processes_min
            self._following = most - len(triples) - 1
            try:
                triples.append(self.triple(len(triples), given, against_truth=len(triples) == truth_at))
            except WorkerError as failure:
                spent = failure.reason is Reason.TIMEOUT
                if not spent or len(triples) < _PROCESSES_TO_SETTLE:
                    raise
                trial.findings.checks["settled"] = f"after {len(triples)} process triples: {failure.detail}"
            process = len(triples)
            if process == 1 and self._alongside:
                self._alongside = near_the_front(triples[0].blocks, trial.alongside)
            if self._progress is not None:
                self._progress(f"timing: {process} of at most {max(process, settings.processes_max)} process triples")
            if process < settings.processes_min and not spent:
                found = self._score(triples, MISS_PROBABILITY) if process > 1 else None
                continue
            # What ends here whatever was seen may miss with all of the probability that is left.
            last = spent or process >= settings.processes_max or trial.gate.held_s - before_s >= _LONG_S
            found = self._score(triples, left if last else early)
            left = left if last else left - early
            if not (last or tells_enough(found, settings, process)):
                continue
            try:
                # Where other strides are allowed, the copy out of them takes longer. It is charged like all such time: the
                # candidate's user pays for it. But it is no lie.
                if Label.STRIDES_DIFFER not in trial.findings.labels:
                    clocks.reject_hidden_time(triples, settings)
            except RejectionError:
                # A busy machine may disturb a whole process. What hides time hides it in the next two as well.
                if spent or process >= settings.processes_max + _SECOND_CHANCES:
                    raise
                continue
            trial.findings.add(self._ahead.last_findings())
            return found, [one.summary for one in triples]

    def triple(self, process: int, given: Mapping[str, Side], against_truth: bool) -> TripleClocks:
        """Start a process triple, but for sides that are given, and time it."""
        trial = self._trial
        phase = functools.partial(counted, trial.findings.phases_s)
        with phase("starts"):
            names = (*SIDES, *(name for name in self._alongside if not trial.is_left_out(name)))
            sides = self._ahead.take(trial, [name for name in names if name not in given])
            for name, side in sides.items():
                side.is_read = name != "null"
                side.is_read_in_place = name != "candidate" and trial.facts.shapes.is_large
            sides |= given
        self._ahead.begin(self._following)
        try:
            run = self._triple_kind(trial, self._check, sides, self._flush)
            with phase("first calls"):
                with trial.gate(shared=True):
                    run.bring_in_step(given.values())
                    run.first_calls()
                trial.findings.add(
                    self._ahead.last_findings()
                )  # a candidate's earlier process is gone before calls are timed
            with on_core(trial.core, (side.worker for side in sides.values())), contextlib.ExitStack() as turn:
                turn.enter_context(trial.gate())
                ends_s = time.perf_counter() + ALONE_S
                with phase("warm-up"):
                    run.warm_up()
                while run.wants_more():
                    if time.perf_counter() >= ends_s:  # let others in
                        turn.close()
                        turn.enter_context(trial.gate())
                        ends_s = time.perf_counter() + ALONE_S
                    with phase("blocks"):
                        run.block()
                    with phase("odd inputs"):
                        run.odd_inputs(self._odd.deal(run.blocks - 1))
                with phase("series"):
                    run.audit()
                    run.verify_held()
                    run.verify_buffers()
                found = run.finish(process)
            self._ahead.end(sides.pop("null"))  # it has nothing to show any more, and memory that others want
            with phase("process"), trial.gate(shared=True):  # measures nothing
                run.verify_weights(against_truth)
                if self._ahead.is_on:
                    self._ahead.end_after(run.process_findings, sides.pop("reference"), sides.pop("candidate"))
                else:
                    trial.findings.add(run.process_findings(sides["reference"], sides["candidate"]))
            return found
        finally:
            for name, side in sides.items():
                if name not in given:
                    self._ahead.end(side)

    def _score(self, triples: Sequence[TripleClocks], miss_probability: float) -> Score:
        left_out = self._trial.is_left_out
        blocks = [
            block.model_copy(
                update={"alongside_us": {name: us for name, us in block.alongside_us.items() if not left_out(name)}}
            )
            for one in triples
            for block in one.blocks
        ]
        return score(blocks, [one.series for one in triples], Scoring(miss_probability=miss_probability))


def near_the_front(blocks: Sequence[TimingBlock], alongside: Mapping[str, Candidate]) -> list[str]:
    """Names of what is worth timing beside the candidate after these blocks."""

    def latency_us(sides: Iterable[Sequence[float]]) -> float:
        return median(value for side in sides for value in side)

    timed = [name for name in alongside if all(name in block.alongside_us for block in blocks)]
    found_us = {name: latency_us(block.alongside_us[name] for block in blocks) for name in timed}
    stock = {name for name in timed if alongside[name].policy == BASELINE_POLICY}
    best_us = min((found_us[name] for name in stock - OVERWRITING), default=math.inf)
    own_us = latency_us(block.candidate_us for block in blocks)
    return [name for name in timed if found_us[name] <= _NEAR * (best_us if name in stock else own_us)]


def tells_enough(found: Score, settings: Settings, processes: int) -> bool:
    """True where further process triples are not worth their time."""
    # How much slower a candidate is that is certainly slower, nobody needs to know to a per cent.
    slower = found.speedup.high < 1 and processes >= _PROCESSES_TO_BE_SURE
    faster = settings.until_certain and clears_noise_floor(found.speedup.low, found.noise_floor)
    closest = min(found.versus.values(), key=lambda ratio: ratio.estimate, default=None)
    decided = closest is None or closest.is_decided
    return found.speedup.half_width < settings.target_half_width or slower or (faster and decided)


class OddInputs:
    """Deals the input sets of the check over the blocks of timing, so that each comes up at least once in the shortest
    run: drawing them anew in each process left out some, and a candidate that fails on those only was accepted.

    Each process has one of the sets that tell precisions (`telling`): the task's own inputs may not.
    """

    def __init__(self, sets: list[InputSet], settings: Settings, telling: Sequence[InputSet] = ()) -> None:
        self._sets = sets
        self._telling, self._tells_at = telling, 0
        self._left: list[InputSet] = []
        self._each = max(2, math.ceil(len(sets) / (settings.processes_min * settings.blocks)))
        self._blocks_min, self._processes_left = settings.blocks, settings.processes_min

    def deal(self, block: int) -> list[InputSet]:
        """Input sets after a block of a process, by its number from 0: none after most of those that only short calls get.

        Which ones, nobody can know before. Asked after every block they took as long as the blocks. In processes beyond the
        least number each has come up, and there is one where there were several.
        """
        if block == 0:
            self._tells_at = random.randrange(self._blocks_min)
            self._processes_left -= 1
            self._each = 1 if self._processes_left < 0 else self._each
        if block >= self._blocks_min and random.random() >= _FURTHER_SHARE:
            return []
        if len(self._left) < min(self._each, len(self._sets)):
            self._left += random.sample(self._sets, len(self._sets))
        dealt, self._left = self._left[: self._each], self._left[self._each :]
        return dealt + random.sample(self._telling, min(len(self._telling), block == self._tells_at))


def start_sides(trial: Trial, names: Sequence[str] = SIDES) -> dict[str, Side]:
    """Sides, all started at once: most of a start is waiting for imports and for the driver."""
    sides: dict[str, Side] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(len(names)) as threads:
        # Whoever starts first gets the first memory: draw that too.
        started = {
            name: threads.submit(trial.start, "reference" if name == "null" else name)
            for name in random.sample(names, len(names))
        }
        for name in names:
            try:
                with forgiving(trial, name):
                    # A future that is kept here would hold, through its error's traceback, the tensors of what failed.
                    sides[name] = started.pop(name).result()
            except (RejectionError, KernelwrightError, WorkerError) as error:
                if failure is None or not isinstance(error, RejectionError | WorkerError):  # then no candidate is to blame
                    failure = error
    if failure is not None:
        for side in sides.values():
            side.close()
        raise failure
    return sides


def _close_after(asked: Future[list[CheckFinding]], side: Side) -> list[CheckFinding]:
    wait([asked])
    side.close()
    return asked.result()


_LOOK_S = 0.05
"""Interval, seconds, in which sides that are no longer wanted are checked for having started."""
_ENDING_MAX = 8
"""Sides that end at once, beside the starts of others."""
_AHEAD_MAX = 2
"""Process triples that start beside the present one: a model that takes seconds to construct takes longer than a triple."""


class SidesAhead:
    """Sides of one evaluation that start while others are measured, and end while others are, if that `is_on`.

    A context takes 0.2 s on a GPU, a model's constructor seconds, and both are work of a processor's other cores, where the
    workers of other evaluations start too. On a processor they would disturb what is timed.
    """

    def __init__(self, trial: Trial, *, is_on: bool) -> None:
        self._trial, self._most = trial, 0
        """Process triples for which memory suffices beside the present one."""
        if is_on and not trial.facts.shapes.is_large:
            self._most = min(_AHEAD_MAX, LARGE_BYTES // max(1, trial.facts.shapes.state_bytes))
        self._threads = ThreadPoolExecutor(_ENDING_MAX + _AHEAD_MAX)
        self._started: list[Future[dict[str, Side]]] = []
        self._last: list[Future[list[CheckFinding]]] = []
        """Findings by a last question, after the end of the candidate that it was asked of."""
        if self._most:
            # Of its own: requests of sides that start may not give the device away while the judge itself uses it.
            self._gate = DeviceGate(trial.facts.device)

    def begin(self, triples: int = 1) -> None:
        """Start the sides of process triples until so many wait, or as many as may."""
        while len(self._started) < min(triples, self._most):
            self._started.append(self._threads.submit(start_sides, replace(self._trial, gate=self._gate), SIDES))

    def take(self, trial: Trial, names: Sequence[str]) -> dict[str, Side]:
        """Sides for a trial; what has not begun starts now. Raises as `start_sides`."""
        sides = self._waited_for()
        for name in [name for name in sides if name not in names]:
            self.end(sides.pop(name))
        for side in sides.values():
            side.serve(trial.gate)
        left = [name for name in names if name not in sides]
        try:
            return sides | (start_sides(trial, left) if left else {})
        except BaseException:
            for side in sides.values():
                side.close()
            raise

    def _waited_for(self) -> dict[str, Side]:
        """Sides of the triple whose start began first; none where memory did not suffice for them beside another triple."""
        try:
            return {**self._started.pop(0).result()} if self._started else {}
        except DeviceError:
            return {}
        except WorkerError as failure:
            if failure.reason is not Reason.OUT_OF_MEMORY:
                raise
            return {}

    @property
    def is_on(self) -> bool:
        """True if sides start and end while others run."""
        return self._most > 0

    def end(self, side: Side) -> None:
        """End a side."""
        if not self.is_on:
            side.close()
            return
        side.serve(self._gate)
        self._threads.submit(side.close)

    def end_after(self, question: Callable[[Side, Side], list[CheckFinding]], reference: Side, candidate: Side) -> None:
        """End two sides after a last question, whose findings `last_findings` has: it takes as long as a first call."""
        for side in (reference, candidate):
            side.serve(self._gate)
        asked = self._threads.submit(question, reference, candidate)
        self._threads.submit(_close_after, asked, reference)
        self._last = [self._threads.submit(_close_after, asked, candidate)]

    def last_findings(self) -> list[CheckFinding]:
        """Findings by the last question, once its candidate has ended; none where none was asked. Raises as the question."""
        return self._last.pop().result() if self._last else []

    def close(self) -> None:
        """End what has begun, and wait for what is ending."""
        with counted(self._trial.findings.phases_s, "ends"):
            while wait(self._started, _LOOK_S).not_done:
                for worker in [*self._gate.workers]:
                    worker.abandon()
            while self._started:
                with contextlib.suppress(RejectionError, WorkerError):  # nobody asks any more
                    for side in self._waited_for().values():
                        self.end(side)
            self._threads.shutdown()
