"""Calls a reference, a candidate and a second reference, all fresh processes, and compares every output.

A block calls the three in random order on one fresh input and again in the mirrored order on another, so that drift
cancels. An audit calls them in series under one request each.

Stock configurations and other finalists may be timed beside the candidate. Their own clocks are believed, because none of
them is accepted by what is measured here; what they answer is compared loosely until the first block.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from kernelwright.errors import DeviceError, TaskError
from kernelwright.judge.check.check import CheckResult
from kernelwright.judge.check.compare import Distance, apart, calls_apart
from kernelwright.judge.check.findings import CheckFinding, RejectionError, held_findings
from kernelwright.judge.check.oracle import Inputs, Outputs
from kernelwright.judge.check.trial import Trial
from kernelwright.judge.check.weights import moved_buffer_findings
from kernelwright.judge.isolation.process import WorkerError
from kernelwright.judge.isolation.side import ALONE_LIMIT_S, SLOTS, CallOutput, Side
from kernelwright.judge.timing import clocks
from kernelwright.judge.timing.answers import LooseAnswers
from kernelwright.judge.timing.clocks import CacheFlush, CallSamples, TripleClocks
from kernelwright.records import Label, Reason
from kernelwright.tasks import device_is_full, has_nan
from kernelwright.tasks.input_sets import InputSet

SIDES = ("reference", "candidate", "null")
BLOCKS_MAX = 64
"""Short calls get no more blocks than this, if the settings do not want more themselves."""
_AUDITS_SHARE, _AUDITS_MAX = 0.5, 16
"""Share of `triple_s` for more audits than the settings want, and most audits: short calls need many to be resolved."""
_SERIES_US = 2000.0
"""Calls of a series take about so long together; our choice."""
_WARMED, _BRIEF_US, _REPEATS_MAX = ("cuda",), 2000.0, 3
"""Kinds of device, latencies and calls for which the host is warmed up: its part of longer calls is too small to matter,
and after three calls it launches kernels as fast as in a loop, after one not quite (`docs/log.md`)."""
_SLOW, _SLOW_TRIES = 4.0, 6
"""Relative latency on an input set that is labelled, and calls that must all have it: load may disturb some. Our choice."""
WATCHED_ROUNDS = 2
"""On a processor, workers run freely for so many rounds, to see what they do between calls, before they are kept still."""


def repeats_before(device: torch.device, latency_us: float) -> int:
    """Calls that warm up the host before a GPU's is timed, where its part is much of some side's. A processor needs none."""
    if device.type not in _WARMED or latency_us >= _BRIEF_US:
        return 0
    return min(_REPEATS_MAX, math.ceil(_BRIEF_US / max(latency_us, 1.0)))


@contextlib.contextmanager
def forgiving(trial: Trial, name: str) -> Iterator[None]:
    """Leave what is timed beside out of the evaluation from its first failure on, and note why; let other sides raise."""
    try:
        yield
    except (RejectionError, WorkerError, DeviceError, RuntimeError) as failure:
        if name not in trial.alongside or (isinstance(failure, RuntimeError) and not device_is_full(failure)):
            raise
        if isinstance(failure, RejectionError | WorkerError):
            trial.leave_out(name, failure.reason, failure.detail)
        else:
            trial.leave_out(name, Reason.OUT_OF_MEMORY, str(failure))


class ProcessTriple:
    """Calls of one process triple, and of what is timed beside the candidate."""

    def __init__(self, trial: Trial, check: CheckResult, sides: dict[str, Side], flush: CacheFlush) -> None:
        self._trial = trial
        self._check = check
        self._answers = LooseAnswers(trial)
        self.sides = sides
        self._flush = flush
        self.samples = {name: CallSamples() for name in sides}
        self.held_call: tuple[Inputs, Outputs, Outputs] | None = None
        """Inputs, the reference's output and the candidate's of the call whose output is held."""
        self._still = trial.facts.device.type == "cpu"
        """Workers run only while they are asked. A device goes on by itself; there, its quiet is watched instead."""
        self._helpers_us = 0.0
        self._asked_us = 0.0
        self._started_s = 0.0
        self._blocks_s = 0.0
        """Time of the blocks so far, seconds."""
        self._in_step = True
        """True if the candidate was called as often as the reference, on the same inputs."""
        self.hold_at = random.randrange(max(1, trial.settings.warmup_calls - trial.facts.shapes.is_large))
        """The warm-up call whose output is kept and compared again at the end. After a large one the next call allocates."""
        self._hold_from, self._hold_at_block = 1, -1
        """The block from which another one is chosen whose output is kept, and that one."""

    @property
    def blocks(self) -> int:
        """Number of blocks so far."""
        return len(self.samples["reference"].clocks) // 2

    @property
    def _names(self) -> list[str]:
        return [name for name in self.sides if not self._trial.is_left_out(name)]

    def wants_more(self) -> bool:
        """True if another block is worth its time: there are fewer than wanted, or they were short."""
        settings, sides = self._trial.settings, len(self._names) / len(SIDES)
        return self.blocks < settings.blocks or (self._blocks_s < settings.triple_s * sides and self.blocks < BLOCKS_MAX)

    def odd_inputs(self, sets: list[InputSet]) -> None:
        """Ask some input sets of the check between timed calls, in this very process: a candidate must not be able to tell
        where it is checked from where it is timed."""
        for chosen in sets:
            answers, inputs = dict[str, CallOutput](), list[Any]()  # before the draw: the earlier ones may be large
            inputs, seed, slot = self._trial.facts.draw(chosen), self._trial.facts.call_seed(), random.randrange(SLOTS)
            try:
                answers = self._asked(inputs, seed, slot)
            except TaskError:
                self._in_step = False
                return  # this draw lies outside the task's domain; the reference's process may be gone with it
            if self._alongside:  # theirs too, and torch.compile would compile anew for other inputs than the task's own
                own = self._trial.facts.draw()
                for name in self._alongside:
                    with forgiving(self._trial, name):
                        self.sides[name].call(self.sides[name].place(own, slot=slot), seed=seed)
            if has_nan(answers["reference"].outputs):
                continue
            allowed = self._check.tolerances[chosen]
            self.expect_near(answers["candidate"], answers["reference"], f"the output on `{chosen.name}`", allowed, inputs)
            for _ in range(_SLOW_TRIES):
                if (slowness := self._slowness(answers)) < _SLOW:
                    break
                answers = self._asked(inputs, seed, slot)
            else:
                detail = (
                    f"on `{chosen.name}` it takes {slowness:.0f} times as long as in timed calls, by the reference's calls"
                )
                self._trial.findings.remark(Label.SLOW_ON_SOME_INPUTS, detail)

    def _asked(self, inputs: list[Any], seed: int | None, slot: int) -> dict[str, CallOutput]:
        """A call of each side. The second reference too: caches must be as warm for all."""
        answers = dict[str, CallOutput]()
        for name in SIDES:
            side, other_us = self.sides[name], max((one.clocks.outer_us for one in answers.values()), default=0.0)
            answers[name] = side.call(side.place(inputs, slot=slot), seed=seed, other_us=other_us)
        return answers

    def _slowness(self, answers: Mapping[str, CallOutput]) -> float:
        """Latency of the candidate's call over the reference's, relative to timed calls; 0 before these, and where it is the
        faster one."""
        mine_us, *others_us = (answers[name].clocks.inner_us for name in ("candidate", "reference", "null"))
        timed = [self.samples[name].clocks for name in ("reference", "candidate")]
        if not timed[0] or mine_us < max(others_us):
            return 0.0
        usual_us, own_us = (median(clock.inner_us for clock in clocks) for clocks in timed)
        return mine_us / max(others_us) * usual_us / own_us

    def bring_in_step(self, checked: Iterable[Side]) -> None:
        """Set buffers back in processes that the check has used: it did not call both sides equally often."""
        if self._trial.reloads_state and self._trial.facts.has_buffers:
            for side in checked:
                side.load_state(self._trial.facts.weights)

    def first_calls(self) -> None:
        """The call in which compilers work, on all sides at once and beside other evaluations'; checked like all others."""
        (inputs, again), seed = self._trial.facts.drawing(), self._trial.facts.call_seed()
        layouts, answers = dict[str, int](), dict[str, CallOutput]()
        for name in self._names:
            with forgiving(self._trial, name):
                layouts[name] = self.sides[name].place(inputs, slot=0)
        hold = self.hold_at == 0
        with ThreadPoolExecutor(len(layouts)) as threads:
            calls = {
                name: threads.submit(self.sides[name].call, layout, seed=seed, hold=hold and self.keeps_outputs(name))
                for name, layout in layouts.items()
            }
        for name in layouts:
            with forgiving(self._trial, name):
                answers[name] = calls.pop(name).result()  # as in `start_sides`
        self._compare([answers["reference"]], [answers["candidate"]], [inputs], again if hold else None)
        self._compare_alongside(answers, inputs)
        if answers["candidate"].clocks.outer_us > ALONE_LIMIT_S / 2 * 1e6:  # it compiles, and may for each layout of inputs
            self.odd_inputs([one for one in self._check.tolerances if one.layout])

    def warm_up(self) -> None:
        """Further calls that allocators and clocks need. They are checked like all others."""
        for index in range(1, self._trial.settings.warmup_calls):
            self.round(self._names, hold=index == self.hold_at, keep=False)
        self._watch_idle_work()
        if self._still:
            for _ in range(WATCHED_ROUNDS):
                self.round(self._names, hold=False, keep=False)
            self._reject_idle_work((time.perf_counter() - self._started_s) * 1e6)
            for name in self._names:
                self.sides[name].worker.keep_still()
            self._watch_idle_work()
        for name in self._alongside:
            self.sides[name].is_read = False

    def _watch_idle_work(self) -> None:
        worker = self.sides["candidate"].worker
        self._helpers_us, self._asked_us = worker.helpers_cpu_us(), worker.asked_us
        self._started_s = time.perf_counter()
        for samples in self.samples.values():
            samples.idle_us.clear()

    def block(self) -> None:
        """Every side on one fresh input, and in the mirrored order on another."""
        start_s = time.perf_counter()
        order = random.sample(self._names, len(self._names))
        self.round(order, hold=self._holds_another(), keep=True)
        self.round(order[::-1], hold=False, keep=True)
        self._blocks_s += time.perf_counter() - start_s

    def _holds_another(self) -> bool:
        """True if this block's first output replaces the earlier one that is kept: calls after the first few may share the
        memory of their outputs as well."""
        done = self.blocks
        if done >= self._hold_from:
            # Once in each stretch of blocks, the next always twice as long: outputs can be large, and one is kept.
            self._hold_at_block = done + random.randrange(done)
            self._hold_from = 2 * done
        if done != self._hold_at_block:
            return False
        self.verify_held()
        return True

    def keeps_outputs(self, name: str) -> bool:
        """True if a side keeps outputs as the candidate does, which changes how the heap is reused; large ones take room."""
        return name == "candidate" or (name in SIDES and not self._trial.facts.shapes.is_large)

    def round(self, order: Any, *, hold: bool, keep: bool) -> None:
        """Call every side on one fresh input, in this order, and compare the candidate\'s output."""
        (inputs, again), seed, slot = self._trial.facts.drawing(), self._trial.facts.call_seed(), random.randrange(SLOTS)
        answers: dict[str, CallOutput] = {}
        briefest_us = min([self.sides["reference"].latency_us, *self.sides["candidate"].calls_us])
        repeats = repeats_before(self._trial.facts.device, briefest_us)
        for name in order:
            if self._trial.is_left_out(name):
                continue
            with forgiving(self._trial, name):
                side, held = self.sides[name], hold and self.keeps_outputs(name)
                answers[name] = side.timed_call(inputs, slot, self._flush, seed=seed, hold=held, repeats=repeats)
            if (answer := answers.get(name)) is None:
                continue
            # What a device still does for the call delays the judge's own kernel.
            quiet_us = [] if self._still else [self._flush()]
            self.samples[name].idle_us.append(answer.clocks.idle_us)
            if keep:
                self.samples[name].clocks.append(answer.clocks)
                self.samples[name].quiet_us += quiet_us
        self._compare([answers["reference"]], [answers["candidate"]], [inputs], again if hold else None)
        if not keep:
            self._compare_alongside(answers, inputs)

    @property
    def _alongside(self) -> list[str]:
        return [name for name in self._names if name not in SIDES]

    def _compare_alongside(self, answers: dict[str, CallOutput], inputs: list[Any]) -> None:
        """Leave out what answers something else than eager."""
        for name in self._alongside:
            if (failed := self._answers.failure(answers[name], answers["reference"], inputs)) is not None:
                self._trial.leave_out(name, failed.reason, failed.detail)

    def _compare(
        self,
        references: Sequence[CallOutput],
        candidates: Sequence[CallOutput],
        draws: Sequence[list[Any]],
        held: Inputs | None = None,
    ) -> None:
        """Compare timed calls on the same inputs; `held` draws those of the only one once more."""
        found = calls_apart([one.outputs for one in candidates], [one.outputs for one in references])
        for reference, candidate, inputs, distance in zip(references, candidates, draws, found, strict=True):
            self._trial.check_form(reference, candidate)
            allowed = self._check.timed_tolerance
            self.expect_near(candidate, reference, "a timed call's output", allowed, inputs, distance)
        if held:
            again = self._trial.facts.redraws and not self._trial.facts.has_buffers
            self.held_call = held, candidate.outputs, [] if again else [one.clone() for one in reference.outputs]

    def expect_near(
        self,
        mine: CallOutput,
        theirs: CallOutput,
        what: str,
        allowed: Distance,
        inputs: list[Any],
        found: Distance | None = None,
    ) -> None:
        """Reject an output too far (`found`, if known) from the reference\'s, unless it is right by the truth."""
        found = found or apart(mine.outputs, theirs.outputs)
        if not found.within(allowed) and not self._check.bounds.settles(inputs, theirs.outputs, mine.outputs):
            raise RejectionError(Reason.TIMED_OUTPUT_WRONG, f"{what} is {found} from the reference's; allowed {allowed}")

    def audit(self) -> None:
        """Call in series under one request each: the clock of a single one has the noise of a GPU's switching contexts."""
        count = self._series_calls()
        settings, start_s = self._trial.settings, time.perf_counter()
        done = self.samples["candidate"].series
        while len(done) < settings.audits or (
            time.perf_counter() - start_s < _AUDITS_SHARE * settings.triple_s and len(done) < _AUDITS_MAX
        ):
            draws = [self._trial.facts.draw() for _ in range(count)]
            seeds = [self._trial.facts.call_seed() for _ in range(count)]
            answers = {}
            for name in random.sample(("reference", "candidate"), 2):
                self._flush()
                answers[name], taken = self.sides[name].series(draws, seeds)
                mean = replace(taken, inner_us=taken.inner_us / count, outer_us=taken.outer_us / count)
                self.samples[name].series.append(mean)
            self._compare(answers["reference"], answers["candidate"], draws)
            del draws, answers  # they may be large, and the next are drawn now

    def _series_calls(self) -> int:
        """Calls of one series: long calls drown the noise by themselves; only short ones need company."""
        latency_us = max(
            median(clock.inner_us for clock in self.samples[name].clocks) for name in ("reference", "candidate")
        )
        return min(self._trial.facts.shapes.series_calls, max(SLOTS, math.ceil(_SERIES_US / max(latency_us, 1.0))))

    def verify_held(self) -> None:
        """Look at an earlier call's output, after all the calls since, for the last time."""
        assert self.held_call is not None
        if not self._check.output_follows_input:  # or the reference returns views of its inputs, which later calls overwrite
            findings, allowed = self._trial.findings, self._check.timed_tolerance
            findings.add(held_findings(self.sides["candidate"], 0, self.held_call[1], allowed, findings.labels))
        for name in SIDES:
            self.sides[name].release()

    def verify_buffers(self) -> None:
        """Reject a candidate that updates statistics and counters only where the check looks and saves the rest.

        The limit is far less than missed calls leave behind, and more than rounding does in hundreds of them.
        """
        trial = self._trial
        if not (self._in_step and trial.reloads_state and trial.facts.has_buffers):
            return
        wanted, found = (self.sides[name].read_state() for name in ("reference", "candidate"))
        trial.findings.add(moved_buffer_findings(trial.facts, wanted, found, "after the timed calls"))

    def process_findings(self, reference: Side, candidate: Side) -> list[CheckFinding]:
        """Deviations of what the candidate has done to its process."""
        return self._trial.process_findings(reference, candidate)

    def verify_weights(self, against_truth: bool) -> None:
        """Check weights and parameters once more, after the last clock: after many calls without a new state_dict a module
        may take its process for a timed one. With `against_truth` a timed output is held to the truth as well."""
        trial = self._trial
        if against_truth and self._check.bounds.has_float64:
            self._verify_error()
        if not (trial.settings.thorough and trial.reloads_state and trial.facts.oracle.parameter_names):
            return
        loaded = trial.facts.new_weights()
        for name in ("reference", "candidate"):
            self.sides[name].load_state(loaded)
        if (far := self._far_from_reference()) is not None:
            raise RejectionError(Reason.STALE_WEIGHTS, f"with other weights loaded after the timed calls, {far}")
        stepped, names = trial.facts.new_weights(), random.choice(trial.facts.two_parts())
        for name in ("reference", "candidate"):
            self.sides[name].step(stepped, names)
        if (far := self._far_from_reference()) is not None:
            trial.findings.remark(Label.PREPACKED_WEIGHTS, f"after a change of parameters in place: {far}")

    def _verify_error(self) -> None:
        """Hold one timed output, of a call chosen at random, to what the check allows. The others are compared with the
        reference's alone, from which a right one may be twice as far as from the truth."""
        assert self.held_call is not None
        (again, outputs, wanted), reference = self.held_call, self.sides["reference"]
        inputs = again()
        wanted = wanted or reference.call(reference.place(inputs, slot=0), seed=None).outputs
        for name in self._names:
            self.sides[name].release_idle()  # a truth of large tensors needs the memory
        if self._check.bounds.settles(inputs, wanted, outputs) is False:
            raise RejectionError(
                Reason.TIMED_OUTPUT_WRONG, "the output of a timed call is further from the truth than the check allows"
            )

    def _far_from_reference(self) -> str | None:
        """Distance of a call's outputs from the reference's with the weights that both hold now, in words; None if near."""
        trial, reference = self._trial, self.sides["reference"]
        state = reference.read_state()
        inputs, seed = trial.facts.draw(), trial.facts.call_seed()
        wanted, outputs = (
            side.call(side.place(inputs, slot=0), seed=seed).outputs for side in (reference, self.sides["candidate"])
        )
        if has_nan(wanted):
            return None  # these weights lie outside the task's domain
        found, allowed = apart(outputs, wanted), self._check.timed_tolerance
        if found.within(allowed) or self._check.bounds.settles(inputs, wanted, outputs, state):
            return None
        return f"the output is {found} from the reference's; allowed {allowed}"

    def finish(self, process: int) -> TripleClocks:
        """Clocks of all calls; raises RejectionError where the candidate worked between calls or after them."""
        if self._still:
            self._reject_idle_work(self.sides["candidate"].worker.asked_us - self._asked_us)
        else:
            self._reject_idle_work((time.perf_counter() - self._started_s) * 1e6)
            clocks.reject_unquiet(self.samples)
        return clocks.cross_examine(process, {name: self.samples[name] for name in self._names}, self._series_calls())

    def _reject_idle_work(self, ran_us: float) -> None:
        helpers_us = self.sides["candidate"].worker.helpers_cpu_us() - self._helpers_us
        clocks.reject_idle_work(self.samples, helpers_us, ran_us, self._trial.settings.idle_limit_us)
