"""How fast? Paired, randomised, in fresh processes, on inputs nobody has seen, with every output compared.

One *process triple* is a reference, a candidate and a second reference (for the A/A noise floor), all fresh. A block
calls the three in random order on one fresh input and again in the mirrored order on another, so that drift cancels.

Two clocks watch each call. The inner one (CUDA events, or the worker's monotonic clock) excludes the harness but lives
in the candidate's process; the outer one is the parent's. What the outer clock sees beyond the inner one is the
harness's own cost, known from the reference, whose worker is trusted. A candidate's excess over that is charged to it:
time hidden from the inner clock is not won, and a large excess rejects. Single requests are noisy (waking a process,
switching GPU contexts), so the charge comes from *audits*: series of calls on fresh inputs under one request.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from kernelwright.errors import KernelwrightError, TaskError
from kernelwright.judge.check.check import CheckResult
from kernelwright.judge.check.compare import Distance, apart
from kernelwright.judge.check.form import check_form, held_output, reject_overwritten
from kernelwright.judge.check.side_effects import check_process
from kernelwright.judge.check.trial import RejectionError, Trial
from kernelwright.judge.check.weights import buffer_has_kept_up
from kernelwright.judge.isolation.process import CallClocks, WorkerError
from kernelwright.judge.isolation.side import SLOTS, CallOutput, Side
from kernelwright.judge.settings import Settings
from kernelwright.judge.timing import outer_clock
from kernelwright.judge.timing.cache import CacheFlush
from kernelwright.judge.timing.timing_core import on_core
from kernelwright.records import Label, Reason, TimingBlock
from kernelwright.records.intervals import Interval, noise_floor, ratio_interval
from kernelwright.tasks.input_sets import InputSet

_SECOND_CHANCES = 2
"""Further process triples for a candidate whose clocks disagree."""
_SIDES = ("reference", "candidate", "null")
BLOCKS_MAX = 64
"""Short calls get no more blocks than this, if the settings do not want more themselves."""
_ALONE_S = 0.4
"""For so long blocks go on once the device is theirs. To get it is to wait until all others are out: beside four other
judges 2.2 of an evaluation's 4.0 s, with a wait for each block, which for short tasks takes 10 to 20 ms; and beside three
others 12 of 33 s, with a wait for each tenth of a second (results/2026-11-22-judge-throughput-2-h200). Our choice."""
_AUDITS_SHARE, _AUDITS_MAX = 0.5, 16
"""Of `triple_s`, for further audits than the settings want: the outer clock needs many to resolve short calls."""
_SERIES_US = 2000.0
_SERIES_SHARE = 0.9
_WARMED, _BRIEF_US, _REPEATS_MAX = ("cuda",), 2000.0, 3
"""Of longer calls the host's part is too small for its warmth to matter. After three calls a host launches kernels as fast
as in a loop, after one not quite (`docs/log.md`)."""
_LONG_S = 10.0
"""Once timing has had the device for so long, no process beyond the least is begun. Without it a task of 22 ms took half a
minute on two cores; our choice."""
_PROCESSES_TO_BE_SURE = 3
_WATCHED_ROUNDS = 2
"""On a processor, workers run freely for so many rounds, to see what they do between calls, before they are kept still."""
_HELPERS_SHARE = 0.1
"""Of the time in which a candidate's processes run, this much may be its children's."""
_QUIET_RATIO, _QUIET_SLACK_US = 1.5, 100.0
"""The parent's own flush after a candidate's call may take this much longer than after a reference's."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What timing found."""

    speedup: Interval
    noise_floor: float | None
    """None where no second reference was measured."""
    reference_us: float
    candidate_us: float
    blocks: tuple[TimingBlock, ...]
    clocks: dict[str, Any]


@dataclass
class _Samples:
    """Clocks of one side in one process triple, in call order."""

    clocks: list[CallClocks] = field(default_factory=list)
    idle_us: list[float] = field(default_factory=list)
    """Processor time between calls."""
    quiet_us: list[float] = field(default_factory=list)
    audited_us: list[float] = field(default_factory=list)
    """Per call, the time outside the inner clock in each series."""
    series_us: list[float] = field(default_factory=list)
    """Per call, the outer clock's time of each series."""

    def harness_us(self) -> list[float]:
        return [clock.outer_us - clock.inner_us for clock in self.clocks]


def time_candidate(
    trial: Trial,
    check: CheckResult,
    flush: CacheFlush,
    on_process: Callable[[int, int], None] | None = None,
    checked: Mapping[str, Side] | None = None,
) -> Timing:
    """Measure until the interval is narrow, or processes or time run out.

    Args:
        trial: The candidate and its task.
        check: What its check has found.
        flush: Of the device in use.
        on_process: Told (finished, most) after each process triple.
        checked: Sides by name that the first triple is to use instead of starting its own; they stay open.

    Raises:
        RejectionError, WorkerError: the candidate misbehaved while timed.
    """
    settings = trial.settings
    blocks: list[TimingBlock] = []
    clocks: list[dict[str, Any]] = []
    outside: list[outer_clock.Outside] = []
    looks = settings.processes_max - settings.processes_min + 1
    odd = OddInputs([*check.tolerances], settings)
    process, before_s = 0, trial.gate.held_s
    while True:
        found, unseen, seen = _time_process(trial, check, flush, odd, process, (checked or {}) if process == 0 else {})
        process += 1
        blocks += found
        outside.append(unseen)
        clocks.append(seen)
        if on_process is not None:
            on_process(process, max(process, settings.processes_max))
        if process < settings.processes_min:
            continue
        by_series = ratio_interval([one.log_ratios for one in outside], looks=looks)
        candidate_us = median(value for block in blocks for value in block.candidate_us)
        hidden_share = outer_clock.hidden_us(outside) / candidate_us
        interval = outer_clock.confirmed(ratio_interval(log_ratios(blocks), looks=looks), by_series, hidden_share)
        # How much slower a candidate is that is certainly slower, nobody needs to know to a per cent.
        slower = interval.high < 1 and process >= _PROCESSES_TO_BE_SURE
        late = trial.gate.held_s - before_s >= _LONG_S
        if process >= settings.processes_max or interval.half_width < settings.target_half_width or slower or late:
            try:
                # Where other strides are allowed, the copy out of them takes longer. It is charged like all such time: the
                # candidate's user pays for it. But it is no lie.
                if Label.STRIDES_DIFFER not in trial.findings.labels:
                    outer_clock.reject_hidden_time(outside, settings)
            except RejectionError:
                # A busy machine may disturb a whole process. What hides time hides it in the next two as well.
                if process >= settings.processes_max + _SECOND_CHANCES:
                    raise
                continue
            break
    return Timing(
        speedup=interval,
        noise_floor=noise_floor(log_ratios(blocks, null=True)),
        reference_us=median(value for block in blocks for value in block.reference_us),
        candidate_us=candidate_us,
        blocks=tuple(blocks),
        clocks={"processes": clocks},
    )


class OddInputs:
    """Deals the input sets of the check over the blocks of timing, so that each comes up at least once in the shortest
    run: drawing them anew in each process left out some, and a candidate that fails on those only was accepted.

    Args:
        sets: The check's input sets.
        settings: Says how many blocks the shortest run has.
    """

    def __init__(self, sets: list[InputSet], settings: Settings) -> None:
        self._sets = sets
        self._left: list[InputSet] = []
        self._each = max(2, math.ceil(len(sets) / (settings.processes_min * settings.blocks)))

    def deal(self) -> list[InputSet]:
        """Those of one block."""
        if len(self._left) < min(self._each, len(self._sets)):
            self._left += random.sample(self._sets, len(self._sets))
        dealt, self._left = self._left[: self._each], self._left[self._each :]
        return dealt


def log_ratios(blocks: list[TimingBlock], *, null: bool = False) -> list[list[float]]:
    """Per process, log(reference latency / candidate latency) of every pair of calls that shared an input.

    Args:
        blocks: Of one or more processes.
        null: Use the second reference in the candidate's place.
    """
    processes: dict[int, list[float]] = {}
    for block in blocks:
        other = block.null_us if null else block.candidate_us
        processes.setdefault(block.process, []).extend(
            math.log(mine) - math.log(theirs) for mine, theirs in zip(block.reference_us, other, strict=True)
        )
    return list(processes.values())


def repeats_before(device: torch.device, latency_us: float) -> int:
    """How many calls warm up the host before one is timed: where the host's part is much of a call.

    On a processor a call is the host's alone, and nothing else runs on its core meanwhile.
    """
    if device.type not in _WARMED or latency_us >= _BRIEF_US:
        return 0
    return min(_REPEATS_MAX, math.ceil(_BRIEF_US / max(latency_us, 1.0)))


def _time_process(
    trial: Trial, check: CheckResult, flush: CacheFlush, odd: OddInputs, process: int, given: Mapping[str, Side]
) -> tuple[list[TimingBlock], outer_clock.Outside, dict[str, Any]]:
    sides = {**_start(trial, [name for name in _SIDES if name not in given]), **given}
    try:
        run = _Run(trial, check, sides, flush)
        with trial.gate(shared=True):
            run.bring_in_step(given.values())
            run.first_calls()
        with on_core(trial.core, (side.worker for side in sides.values())):
            with trial.gate():
                run.warm_up()
            while run.wants_more():
                with trial.gate():
                    ends_s = time.perf_counter() + _ALONE_S
                    while run.wants_more() and time.perf_counter() < ends_s:
                        run.block()
                        run.odd_inputs(odd.deal())
            with trial.gate():
                run.audit()
                run.verify_held()
                run.verify_buffers()
            found = run.finish(process)
        with trial.gate(shared=True):  # measures nothing
            run.verify_process()
        return found
    finally:
        for name, side in sides.items():
            if name not in given:
                side.close()


def _start(trial: Trial, names: Sequence[str] = _SIDES) -> dict[str, Side]:
    """Sides, started beside one another: most of a start is waiting for imports and for the driver."""
    sides: dict[str, Side] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(len(names)) as threads:
        # Whoever starts first gets the first memory: draw that too.
        started = {
            threads.submit(trial.start, "reference" if name == "null" else name): name
            for name in random.sample(names, len(names))
        }
        for future in as_completed(started):
            try:
                sides[started[future]] = future.result()
            except (RejectionError, KernelwrightError, WorkerError) as error:
                failure = error
    if failure is not None:
        for side in sides.values():
            side.close()
        raise failure
    return sides


class _Run:
    """Calls of one process triple."""

    def __init__(self, trial: Trial, check: CheckResult, sides: dict[str, Side], flush: CacheFlush) -> None:
        self._trial = trial
        self._check = check
        self._sides = sides
        self._flush = flush
        self._samples = {name: _Samples() for name in sides}
        self._first: tuple[list[Any], list[torch.Tensor]] | None = None
        """Inputs and the reference's output of the call whose output is held."""
        self._still = trial.facts.device.type == "cpu"
        """Workers run only while they are asked. A device goes on by itself; there, its quiet is watched instead."""
        self._helpers_us = 0.0
        self._asked_us = 0.0
        self._started_s = 0.0
        self._blocks_s = 0.0
        """How long the blocks so far have taken."""
        self._in_step = True
        """Whether the candidate was called as often as the reference, on the same inputs."""
        self._hold_at = random.randrange(trial.settings.warmup_calls)
        """The warm-up call whose output is kept in the worker and compared again at the end."""
        self._hold_from, self._hold_at_block = 1, -1
        """The block from which another one is chosen whose output is kept, and that one."""

    def wants_more(self) -> bool:
        """Whether another block is worth its time: there are fewer than wanted, or they were short."""
        settings, done = self._trial.settings, len(self._samples["reference"].clocks) // 2
        return done < settings.blocks or (self._blocks_s < settings.triple_s and done < BLOCKS_MAX)

    def odd_inputs(self, sets: list[InputSet]) -> None:
        """Some of the input sets of the check, in this very process and between timed calls: a candidate must not be
        able to tell where it is checked from where it is timed."""
        for chosen in sets:
            inputs, seed = self._trial.facts.draw(chosen), self._trial.facts.call_seed()
            answers: dict[str, CallOutput] = {}
            try:
                for name in _SIDES:  # the second reference too: caches must be as warm for all
                    side = self._sides[name]
                    answers[name] = side.call(side.place(inputs, slot=random.randrange(SLOTS)), seed=seed)
            except TaskError:
                self._in_step = False
                return  # this draw lies outside the task's domain; the reference's process may be gone with it
            wanted = answers["reference"].outputs
            if any(bool(torch.isnan(output).any()) for output in wanted if output.is_floating_point()):
                continue
            allowed = self._check.tolerances[chosen]
            self._near(answers["candidate"].outputs, wanted, f"the output on `{chosen.name}`", allowed, inputs)

    def bring_in_step(self, checked: Iterable[Side]) -> None:
        """Set buffers back in processes that the check has used: it did not call both sides equally often."""
        if self._trial.reloads_state and self._trial.facts.has_buffers:
            for side in checked:
                side.load_state(self._trial.facts.weights)

    def first_calls(self) -> None:
        """The call in which compilers work, on all sides at once and beside other evaluations'; checked like all others."""
        inputs, seed = self._trial.facts.draw(), self._trial.facts.call_seed()
        layouts = {name: side.place(inputs, slot=0) for name, side in self._sides.items()}
        with ThreadPoolExecutor(len(layouts)) as threads:
            calls = {
                name: threads.submit(self._sides[name].call, layout, seed=seed, hold=self._hold_at == 0)
                for name, layout in layouts.items()
            }
        answers = {name: call.result() for name, call in calls.items()}
        self._compare(answers["reference"], answers["candidate"], inputs)
        if self._hold_at == 0:
            self._first = inputs, answers["reference"].outputs

    def warm_up(self) -> None:
        """Further calls that allocators and clocks need. They are checked like all others."""
        for index in range(1, self._trial.settings.warmup_calls):
            self._round(_SIDES, hold=index == self._hold_at, keep=False)
        self._watch_idle_work()
        if self._still:
            for _ in range(_WATCHED_ROUNDS):
                self._round(_SIDES, hold=False, keep=False)
            self._reject_idle_work((time.perf_counter() - self._started_s) * 1e6)
            for side in self._sides.values():
                side.worker.keep_still()
            self._watch_idle_work()

    def _watch_idle_work(self) -> None:
        """From now on."""
        worker = self._sides["candidate"].worker
        self._helpers_us, self._asked_us = worker.helpers_cpu_us(), worker.asked_us
        self._started_s = time.perf_counter()
        for samples in self._samples.values():
            samples.idle_us.clear()

    def block(self) -> None:
        """Every side on one fresh input, and in the mirrored order on another."""
        start_s = time.perf_counter()
        order = random.sample(_SIDES, len(_SIDES))
        self._round(order, hold=self._holds_another(), keep=True)
        self._round(order[::-1], hold=False, keep=True)
        self._blocks_s += time.perf_counter() - start_s

    def _holds_another(self) -> bool:
        """Whether the output of this block's first call is kept from now on, in the place of the earlier one's: calls after
        the first few may share the memory of their outputs as well."""
        done = len(self._samples["reference"].clocks) // 2
        if done >= self._hold_from:
            # Once in each stretch of blocks, the next always twice as long: outputs can be large, and one is kept.
            self._hold_at_block = done + random.randrange(done)
            self._hold_from = 2 * done
        if done != self._hold_at_block:
            return False
        self.verify_held()
        for side in self._sides.values():
            side.release()
        return True

    def _round(self, order: Any, *, hold: bool, keep: bool) -> None:
        inputs, seed = self._trial.facts.draw(), self._trial.facts.call_seed()
        answers: dict[str, CallOutput] = {}
        repeats = repeats_before(self._trial.facts.device, self._sides["reference"].latency_us)
        for name in order:
            # Held on all sides: it changes how the heap is reused.
            answer = self._sides[name].timed_call(inputs, self._flush, seed=seed, hold=hold, repeats=repeats)
            quiet_us = self._flush()
            answers[name] = answer
            self._samples[name].idle_us.append(answer.clocks.idle_us)
            if keep:
                self._samples[name].clocks.append(answer.clocks)
                self._samples[name].quiet_us.append(quiet_us)
        self._compare(answers["reference"], answers["candidate"], inputs)
        if hold:
            self._first = inputs, answers["reference"].outputs

    def _compare(self, reference: CallOutput, candidate: CallOutput, inputs: list[Any]) -> None:
        check_form(self._trial, reference, candidate)
        allowed = self._check.timed_tolerance
        self._near(candidate.outputs, reference.outputs, "a timed call's output", allowed, inputs)

    def _near(
        self, outputs: list[torch.Tensor], wanted: list[torch.Tensor], what: str, allowed: Distance, inputs: list[Any]
    ) -> None:
        found = apart(outputs, wanted)
        if not found.within(allowed) and not self._settled(inputs, wanted, outputs):
            raise RejectionError(
                Reason.TIMED_OUTPUT_WRONG,
                f"{what} is {found} from the reference's; allowed {allowed}",
            )

    def _settled(self, inputs: list[Any], wanted: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Whether outputs are right by the truth of these very inputs, though far from the reference's."""
        return self._check.bounds.settles(inputs, wanted, outputs, training=self._trial.facts.oracle.training)

    def audit(self) -> None:
        """Series of calls under one request each: they tell the outer clock's view of one call far better than a single
        request does, whose noise on a GPU is that of switching contexts."""
        latency_us = median(clock.inner_us for clock in self._samples["reference"].clocks)
        # Long calls drown the noise by themselves; only short ones need company.
        count = min(self._trial.facts.shapes.series_calls, max(SLOTS, math.ceil(_SERIES_US / max(latency_us, 1.0))))
        settings, start_s = self._trial.settings, time.perf_counter()
        done = self._samples["candidate"].series_us
        while len(done) < settings.audits or (
            time.perf_counter() - start_s < _AUDITS_SHARE * settings.triple_s and len(done) < _AUDITS_MAX
        ):
            draws = [self._trial.facts.draw() for _ in range(count)]
            seeds = [self._trial.facts.call_seed() for _ in range(count)]
            answers = {}
            for name in random.sample(("reference", "candidate"), 2):
                self._flush()
                answers[name], clocks = self._sides[name].series(draws, seeds)
                self._samples[name].audited_us.append((clocks.outer_us - clocks.inner_us) / count)
                self._samples[name].series_us.append(clocks.outer_us / count)
            for reference, candidate, inputs in zip(answers["reference"], answers["candidate"], draws, strict=True):
                self._compare(reference, candidate, inputs)

    def verify_held(self) -> None:
        """An earlier call's output, after all the calls since."""
        assert self._first is not None
        if self._check.output_follows_input:
            return  # the reference itself returns views of its inputs, which later calls overwrite
        inputs, wanted = self._first
        held = held_output(self._trial, self._sides["candidate"], 0)
        if held is None:
            return
        if not apart(held, wanted).within(self._check.timed_tolerance) and not self._settled(inputs, wanted, held):
            reject_overwritten(self._trial)

    def verify_buffers(self) -> None:
        """Statistics and counters, after all the timed calls: who updates them only where the check looks saves the rest.

        What is allowed is far less than missed calls leave behind, and more than rounding does in hundreds of them.
        """
        trial = self._trial
        if not (self._in_step and trial.reloads_state and trial.facts.has_buffers):
            return
        wanted, found = (self._sides[name].read_state() for name in ("reference", "candidate"))
        for key in sorted(wanted.keys() - trial.facts.oracle.parameter_names):
            if not buffer_has_kept_up(found[key], wanted[key], trial.facts.weights[key]):
                raise RejectionError(
                    Reason.BUFFER_MISMATCH, f"buffer `{key}` differs from the reference's after the timed calls"
                )

    def verify_process(self) -> None:
        """What the check has looked at, once more in a process of which no clock has any more to say: who waited for many
        calls without a new state_dict took it for one that is timed."""
        trial, candidate = self._trial, self._sides["candidate"]
        check_process(trial, candidate)
        if not (trial.settings.thorough and trial.reloads_state and trial.facts.oracle.parameter_names):
            return
        loaded = trial.facts.new_weights()
        for name in ("reference", "candidate"):
            self._sides[name].load_state(loaded)
        far = self._far_from_reference()
        if far is not None:
            raise RejectionError(Reason.STALE_WEIGHTS, f"with other weights loaded after the timed calls, {far}")
        stepped, names = trial.facts.new_weights(), random.choice(trial.facts.two_parts())
        for name in ("reference", "candidate"):
            self._sides[name].step(stepped, names)
        far = self._far_from_reference()
        if far is not None:
            trial.findings.label(Label.PREPACKED_WEIGHTS, f"after a change of parameters in place: {far}")

    def _far_from_reference(self) -> str | None:
        """In words, how far the outputs of a call are from the reference's with the weights that both hold now."""
        trial, allowed = self._trial, self._check.timed_tolerance
        reference = self._sides["reference"]
        state = reference.read_state()
        inputs, seed = trial.facts.draw(), trial.facts.call_seed()
        wanted, outputs = (
            side.call(side.place(inputs, slot=0), seed=seed).outputs for side in (reference, self._sides["candidate"])
        )
        if any(bool(torch.isnan(output).any()) for output in wanted if output.is_floating_point()):
            return None  # these weights lie outside the task's domain
        found = apart(outputs, wanted)
        if found.within(allowed):
            return None
        training = trial.facts.oracle.training
        if self._check.bounds.settles(inputs, wanted, outputs, training=training, state=state):
            return None
        return f"the output is {found} from the reference's; allowed {allowed}"

    def finish(self, process: int) -> tuple[list[TimingBlock], outer_clock.Outside, dict[str, Any]]:
        """Cross-examine the clocks and charge the candidate what its own did not see."""
        reference, candidate, null = (self._samples[name] for name in _SIDES)
        if self._still:
            self._reject_idle_work(self._sides["candidate"].worker.asked_us - self._asked_us)
        else:
            self._reject_idle_work((time.perf_counter() - self._started_s) * 1e6)
            self._reject_unquiet()
        latency_us = median(clock.inner_us for clock in reference.clocks)
        trusted_us = [*reference.harness_us(), *null.harness_us()]
        own_us = median(reference.audited_us)
        audited_us = median(candidate.audited_us) - own_us
        slack_us = outer_clock.slack_us(reference.audited_us, candidate.audited_us)
        charge_us = max(0.0, audited_us - slack_us)
        # A lie told in single calls only: they cannot be much faster than the same calls in a series, which the outer
        # clock sees and which run with warmer caches. Where calls in a series take longer all the same, the reference's
        # do so too; and only what is certain counts.
        theirs_us = float(np.quantile(reference.series_us, 0.75)) - own_us
        mine_us = float(np.quantile(candidate.series_us, 0.25)) - own_us - slack_us
        least_us = _SERIES_SHARE * max(0.0, mine_us) * min(1.0, latency_us / max(theirs_us, 0.01 * latency_us))
        found = [
            TimingBlock(
                process=process,
                reference_us=_pair(reference, index),
                null_us=_pair(null, index),
                candidate_us=tuple(max(value + charge_us, least_us) for value in _pair(candidate, index)),
            )
            for index in range(len(reference.clocks) // 2)
        ]
        smallest_us = 0.01 * latency_us  # a clock's noise may be all that is left of a fast candidate
        outside = outer_clock.Outside(
            latency_us,
            (candidate.harness_us(), trusted_us),
            (candidate.audited_us, reference.audited_us),
            charge_us,
            [
                math.log(max(theirs - own_us, smallest_us)) - math.log(max(mine - own_us, smallest_us))
                for theirs, mine in zip(reference.series_us, candidate.series_us, strict=True)
            ],
        )
        return (
            found,
            outside,
            {
                "harness_us": median(trusted_us),
                "excess_us": median(candidate.harness_us()) - median(trusted_us),
                "audited_us": audited_us,
                "slack_us": slack_us,
                "charged_us": charge_us,
                "least_us": least_us,
            },
        )

    def _reject_idle_work(self, ran_us: float) -> None:
        """`ran_us`: for how long the candidate's processes could run."""
        excess_us = outer_clock.certain_excess(self._samples["candidate"].idle_us, self._samples["reference"].idle_us)
        if excess_us > self._trial.settings.idle_limit_us:
            raise RejectionError(
                Reason.WORK_OUTSIDE_TIMING,
                f"the process used {excess_us:.0f} us of processor time between calls beyond the reference's",
            )
        helpers_us = self._sides["candidate"].worker.helpers_cpu_us() - self._helpers_us
        if helpers_us > _HELPERS_SHARE * ran_us:
            raise RejectionError(
                Reason.WORK_OUTSIDE_TIMING, f"its child processes used {helpers_us / 1e3:.0f} ms while it was timed"
            )

    def _reject_unquiet(self) -> None:
        candidate, reference = (self._samples[name].quiet_us for name in ("candidate", "reference"))
        usual_us = median(reference)
        if outer_clock.certain_excess(candidate, reference) > (_QUIET_RATIO - 1) * usual_us + _QUIET_SLACK_US:
            raise RejectionError(
                Reason.DEVICE_NOT_QUIET,
                f"a cache flush after its calls takes {median(candidate):.0f} us; after the reference's {usual_us:.0f} us",
            )


def _pair(samples: _Samples, index: int) -> tuple[float, ...]:
    return tuple(clock.inner_us for clock in samples.clocks[2 * index : 2 * index + 2])
