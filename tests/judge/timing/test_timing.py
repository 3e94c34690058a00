"""Timing without processes: what is made of clocks, which are made up here."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from kernelwright.errors import DeviceError, TaskError
from kernelwright.gpu import devices
from kernelwright.judge import Settings
from kernelwright.judge.check.compare import Distance
from kernelwright.judge.check.findings import CheckFindings, Demands, RejectionError
from kernelwright.judge.isolation.process import CallClocks, WorkerError
from kernelwright.judge.timing import clocks, triple
from kernelwright.judge.timing import pairs as timing
from kernelwright.judge.timing.clocks import CacheFlush, last_level_cache_bytes
from kernelwright.judge.timing.pairs import PairedTiming
from kernelwright.judge.timing.triple import SIDES, ProcessTriple
from kernelwright.records import Candidate, Label, Reason, TimingBlock, TimingSeries, scoring
from kernelwright.records.intervals import MISS_PROBABILITY, Interval
from kernelwright.records.scoring import Charge, log_ratios
from kernelwright.tasks.input_sets import InputSet
from tests.judge.snippets import ANY_WAIT, RELU

CPU = torch.device("cpu")


UNSETTLED = SimpleNamespace(settles=lambda *given: False)
UNCHECKED = SimpleNamespace(tolerances={})


class FakeGate:
    held_s = 0.0

    def __call__(self, *, shared=False):
        return contextlib.nullcontext()


class FakeTrial:
    def __init__(self, device=CPU):
        self.facts = self
        self.findings = CheckFindings(Demands())
        self.device = device
        self.settings = Settings.quick(threads=1, excess_limit=0.25, excess_limit_us=100.0, idle_limit_us=3000.0)
        self.check = SimpleNamespace(
            bounds=UNSETTLED, tolerances={}, timed_tolerance=Distance(1e-6, 1e-5), output_follows_input=False
        )
        self.shapes = SimpleNamespace(series_calls=16, is_large=False)
        self.redraws = self.has_buffers = False
        self.oracle = SimpleNamespace(training=True)
        self.gate = FakeGate()
        self.alongside = {}
        self.is_left_out = set().__contains__

    def drawing(self):
        drawn = self.draw()
        return drawn, lambda: drawn


class FakeSide:
    """Its worker's children have used this much processor time."""

    def __init__(self, helpers_us=0.0, held=None):
        self.worker = SimpleNamespace(helpers_cpu_us=lambda: helpers_us, asked_us=1e6)
        self.held = held

    def recopy(self, index):
        return self.held

    def release(self):
        self.held = None


def run_of(trial=None, helpers_us=0.0, held=None):
    sides = {name: FakeSide(helpers_us if name == "candidate" else 0.0, held) for name in SIDES}
    trial = trial or FakeTrial()
    return ProcessTriple(trial, trial.check, sides, lambda: 0.0)


def fill(
    run,
    name,
    *,
    inner_us=1000.0,
    harness_us=50.0,
    idle_us=10.0,
    quiet_us=500.0,
    audited_us=5.0,
    calls=8,
    series_us=None,
):
    samples = run.samples[name]
    samples.clocks += [CallClocks(inner_us, inner_us + harness_us, idle_us)] * calls
    samples.idle_us += [idle_us] * calls
    samples.quiet_us += [quiet_us] * calls
    outer_us = (inner_us if series_us is None else series_us) + audited_us
    samples.series += [CallClocks(outer_us - audited_us, outer_us, 0.0)] * 5


def filled(trial=None, helpers_us=0.0, **candidate):
    run = run_of(trial, helpers_us)
    for name in SIDES:
        fill(run, name, **(candidate if name == "candidate" else {}))
    return run


@pytest.mark.parametrize(
    "error", [RejectionError(Reason.NO_MODEL_NEW, "none"), WorkerError(Reason.CRASHED, "gone"), TaskError("Wanted a task.")]
)
def test_a_side_that_does_not_start_closes_the_others(error):
    closed = []

    def start(role):
        if role == "candidate":
            raise error
        return SimpleNamespace(close=lambda: closed.append(role))

    with pytest.raises(type(error)) as caught:
        timing.start_sides(SimpleNamespace(start=start, facts=FakeTrial(), alongside={}))
    assert caught.value is error
    assert closed == ["reference", "reference"]


def test_where_reference_and_candidate_do_not_start_the_candidate_is_not_to_blame():
    def start(role):
        raise TaskError("Wanted a task.") if role == "reference" else WorkerError(Reason.CRASHED, "gone")

    for _ in range(4):
        with pytest.raises(TaskError):
            timing.start_sides(SimpleNamespace(start=start, facts=FakeTrial(), alongside={}))


def test_sides_that_were_checked_serve_the_first_triple_and_stay_open():
    started, closed, used = [], [], []

    def side(name):
        return SimpleNamespace(close=lambda: closed.append(name))

    gate = contextlib.nullcontext
    trial = SimpleNamespace(
        core=None,
        alongside={},
        start=lambda role: started.append(role) or side("fresh"),
        gate=lambda shared=False: gate(),
        findings=CheckFindings(Demands()),
        facts=FakeTrial(),
        settings=Settings.quick(),
    )

    class Run:
        def __init__(self, trial, check, sides, flush):
            used.append(dict(sides))

        def __getattr__(self, name):
            return lambda *given: {"wants_more": False, "process_findings": []}.get(name, "found")

        def verify_weights(self, against_truth):
            assert closed[-1:] == ["fresh"], "the second reference has ended: a truth takes memory"

    timed = PairedTiming(trial, UNCHECKED, None, triple_kind=Run)
    given = {"reference": side("reference"), "candidate": side("candidate")}
    assert timed.triple(0, given, against_truth=False) == "found"
    assert (started, closed) == (["reference"], ["fresh"])
    assert {name: used[0][name] for name in given} == given
    assert set(used[0]) == set(SIDES)
    timed.triple(1, {}, against_truth=False)
    assert sorted(started[1:]) == ["candidate", "reference", "reference"]
    assert closed == ["fresh"] * 4
    trial.alongside, trial.is_left_out = dict.fromkeys(["compile", "cudnn"]), lambda name: name == "cudnn"
    PairedTiming(trial, UNCHECKED, None, triple_kind=Run).triple(1, {}, against_truth=False)
    assert sorted(started[4:]) == ["candidate", "compile", "reference", "reference"]
    assert closed == ["fresh"] * 8


def test_of_large_outputs_only_the_candidates_are_kept_and_never_the_last_before_timing():
    trial = FakeTrial()
    for large, kept in ((False, list(SIDES)), (True, ["candidate"])):
        trial.shapes.is_large = large
        run = run_of(trial)
        assert [name for name in (*SIDES, "compile") if run.keeps_outputs(name)] == kept
    last = trial.settings.warmup_calls - 1
    assert last > 0
    assert {run_of(trial).hold_at for _ in range(100)} == set(range(last))
    trial.shapes.is_large = False
    assert {run_of(trial).hold_at for _ in range(100)} == set(range(last + 1))


@pytest.fixture
def simulated_time(monkeypatch):
    """Time of the loop over blocks, which passes only where a test lets it."""
    time = SimpleNamespace(now_s=0.0, perf_counter=lambda: time.now_s)
    monkeypatch.setattr(timing, "time", time)
    return time


def test_short_blocks_are_measured_together_and_long_ones_let_others_in_between(simulated_time):
    entered = []

    @contextlib.contextmanager
    def gate(shared=False):
        entered.append("shared" if shared else 0)
        yield

    def blocks_for_each_entry(block_s, wanted):
        entered.clear()

        class Run:
            done = 0

            def __init__(self, *given):
                pass

            def __getattr__(self, name):
                return lambda *given: []

            blocks = property(lambda self: Run.done)

            def wants_more(self):
                return Run.done < wanted

            def block(self):
                simulated_time.now_s += block_s
                entered[-1] += 1
                Run.done += 1

        given = dict.fromkeys(SIDES[:2], SimpleNamespace(close=lambda: None))
        findings, settings = CheckFindings(Demands()), Settings.quick()
        trial = SimpleNamespace(core=None, gate=gate, alongside={}, findings=findings, settings=settings)
        trial.start, trial.facts = lambda role: SimpleNamespace(close=lambda: None), FakeTrial()
        PairedTiming(trial, UNCHECKED, None, triple_kind=Run).triple(0, given, against_truth=False)
        return entered[1:-1]  # without the first calls and the look at the process

    assert blocks_for_each_entry(timing.ALONE_S / 3.5, 10) == [4, 4, 2]
    assert blocks_for_each_entry(timing.ALONE_S * 3, 3) == [1, 1, 1]


class OddSide:
    """Answers a call with the inputs, moved by `error`, or raises."""

    def __init__(self, error=0.0, outer_us=1000.0):
        self.error = error
        self.outer_us = outer_us
        self.asked, self.told_us = [], []

    def place(self, inputs, slot):
        self.asked.append(inputs)
        return 0

    def call(self, layout, *, seed, hold=False, other_us=0.0):
        self.told_us.append(other_us)
        if isinstance(self.error, Exception):
            raise self.error
        clocks = CallClocks(self.outer_us, self.outer_us, 0.0)
        return SimpleNamespace(outputs=[self.asked[-1][0] + self.error], clocks=clocks)


def odd_run(**errors):
    """The trial draws ones, or what the input set makes of them, and allows all sets but `strict` any error."""
    trial = FakeTrial()
    trial.draw = lambda chosen=None: chosen.apply([torch.ones(4)], torch.Generator()) if chosen else [torch.ones(4)]
    trial.call_seed = lambda: None
    sides = {name: OddSide(errors.get(name, 0.0)) for name in SIDES}
    return ProcessTriple(trial, trial.check, sides, lambda: 0.0), trial, sides


def odd_set(trial, name, vary=lambda x, g: x, allowed=1e-6):
    made = InputSet(name, vary, "")
    trial.check.tolerances[made] = Distance(allowed, allowed)
    return made


def test_odd_inputs_are_judged_by_their_own_tolerance_on_every_side():
    run, trial, sides = odd_run(candidate=1e-3)
    run.odd_inputs([odd_set(trial, "loose", allowed=0.1)])
    assert [len(side.asked) for side in sides.values()] == [1, 1, 1]
    with pytest.raises(RejectionError, match="`strict`") as caught:
        run.odd_inputs([odd_set(trial, "strict")])
    assert caught.value.reason is Reason.TIMED_OUTPUT_WRONG


@pytest.mark.parametrize(
    ("candidate_us", "usual_us", "slow"),
    [(5000.0, 1000.0, True), (3000.0, 1000.0, False), (2000.0, 100.0, True), (900.0, 100.0, False), (9000.0, 4000.0, False)],
)
def test_a_candidate_that_is_slow_on_some_inputs_is_labelled(candidate_us, usual_us, slow):
    run, trial, sides = odd_run()
    trial.findings = CheckFindings(Demands())
    odd = odd_set(trial, "odd")
    sides["candidate"].outer_us = candidate_us
    run.odd_inputs([odd])
    assert not trial.findings.labels, "there is nothing to compare it with yet"
    for name in SIDES:
        fill(run, name, inner_us=usual_us if name == "candidate" else 1000.0)
    run.odd_inputs([odd])
    assert (Label.SLOW_ON_SOME_INPUTS in trial.findings.labels) is slow
    assert len({len(side.asked) for side in sides.values()}) == 1, "a state that calls move is the same in all"


def test_a_call_that_load_has_disturbed_is_made_again():
    run, trial, sides = odd_run()
    for name in SIDES:
        fill(run, name)
    sides["candidate"].outer_us = 9000.0
    call = sides["candidate"].call

    def faster(layout, **how):
        answer = call(layout, **how)
        sides["candidate"].outer_us = 1000.0
        return answer

    sides["candidate"].call = faster
    run.odd_inputs([odd_set(trial, "odd")])
    assert not trial.findings.labels
    assert len(sides["candidate"].asked) == 2


def test_a_candidate_may_take_for_odd_inputs_what_the_reference_took():
    """A copy out of another layout can take seconds of a large tensor."""
    run, trial, sides = odd_run()
    sides["reference"].outer_us = 7e6
    run.odd_inputs([odd_set(trial, "loose", allowed=0.1)])
    assert (sides["reference"].told_us, sides["candidate"].told_us) == ([0.0], [7e6])


def test_what_is_beside_is_called_as_often_and_not_on_odd_inputs_for_which_it_would_compile_anew():
    """Without these calls the same program seemed 4 % slower beside the candidate than as the candidate, on a processor."""
    run, trial, sides = odd_run()
    sides["compile"] = OddSide()
    run.odd_inputs([odd_set(trial, "loose", lambda x, g: x * 2, allowed=0.1)])
    assert [side.asked[0][0].tolist() for side in sides.values()] == [[2.0] * 4] * 3 + [[1.0] * 4]


@pytest.mark.parametrize(("first_call_s", "asked"), [(0.5, 1), (9.0, 2)])
def test_what_compiles_does_so_for_other_layouts_before_it_has_the_device_alone(first_call_s, asked):
    """Alone it has five seconds for a call, and torch.compile takes longer for another layout of a large network."""
    run, trial, sides = odd_run()
    sides["candidate"].outer_us = first_call_s * 1e6
    trial.check_form = lambda *given: None
    elsewhere = InputSet("elsewhere", lambda x, g: x.clone(), "", layout=True)
    trial.check.tolerances |= {elsewhere: Distance(1e-6, 1e-6), InputSet("negative", lambda x, g: -x, ""): Distance(0, 0)}
    run.first_calls()
    assert [len(side.asked) for side in sides.values()] == [asked] * 3
    sides["candidate"].error = 1e-3
    trial.check.timed_tolerance = Distance(1.0, 1.0)
    with pytest.raises(RejectionError, match="`elsewhere`") if asked == 2 else contextlib.nullcontext():
        run.first_calls()


def test_a_draw_on_which_the_reference_gives_nan_is_passed_over_and_the_next_is_not():
    run, trial, sides = odd_run(candidate=1.0)
    nan = odd_set(trial, "nan", lambda x, g: x * math.nan)
    run.odd_inputs([nan])
    with pytest.raises(RejectionError, match="`strict`"):
        run.odd_inputs([nan, odd_set(trial, "strict")])
    assert len(sides["null"].asked) == 3


@pytest.mark.parametrize(
    "failure",
    [
        RejectionError(Reason.BUILD_FAILED, "no"),
        WorkerError(Reason.CRASHED, "gone"),
        DeviceError("Wanted memory."),
        torch.OutOfMemoryError("full"),
    ],
)
def test_what_fails_beside_the_candidate_is_left_out_and_any_other_side_raises(failure):
    left_out = {}
    trial = SimpleNamespace(alongside={"rival": None}, leave_out=lambda name, *why: left_out.update({name: why}))
    with triple.forgiving(trial, "rival"):
        raise failure
    reason = getattr(failure, "reason", Reason.OUT_OF_MEMORY)
    assert left_out == {"rival": (reason, getattr(failure, "detail", str(failure)))}
    with pytest.raises(type(failure)), triple.forgiving(trial, "candidate"):
        raise failure
    with pytest.raises(RuntimeError, match="a fault of the judge"), triple.forgiving(trial, "rival"):
        raise RuntimeError("a fault of the judge")


def test_a_draw_on_which_the_reference_fails_ends_this_turn():
    run, trial, sides = odd_run(candidate=1.0, reference=TaskError("Wanted the reference to run."))
    run.odd_inputs([odd_set(trial, "one"), odd_set(trial, "two")])
    assert [len(side.asked) for side in sides.values()] == [1, 0, 0]


def test_buffers_are_not_compared_after_a_call_that_the_reference_alone_had():
    run, trial, _ = odd_run(reference=TaskError("Wanted the reference to run."))
    trial.reloads_state = trial.has_buffers = True
    run.odd_inputs([odd_set(trial, "one")])
    run.verify_buffers()  # these sides have none that could be read


class WarmedSide(OddSide):
    def __init__(self, story, name, takes_us):
        super().__init__()
        self.story, self.name, self.takes_us, self.latency_us = story, name, takes_us, math.inf
        self.seen_us, self.calls_us = takes_us, []

    def timed_call(self, inputs, slot, flush, *, seed, hold, repeats):
        self.story.append((self.name, repeats))
        answer = super().call(super().place(inputs, 0), seed=seed)
        answer.clocks = CallClocks(self.takes_us, self.takes_us, 0.0)
        self.latency_us = self.takes_us
        self.calls_us.append(self.seen_us)
        return answer


@pytest.mark.parametrize(
    ("device", "latency_us", "seen_us", "repeats"),
    [
        ("cuda", 50.0, 5000.0, 3),
        ("cuda", 1500.0, 5000.0, 2),
        ("cuda", 5000.0, 5000.0, 0),
        ("cuda", 5000.0, 300.0, 3),
        ("cpu", 50.0, 300.0, 0),
    ],
)
def test_where_a_call_on_a_gpu_is_brief_every_side_repeats_its_latest(device, latency_us, seen_us, repeats):
    trial, story = FakeTrial(torch.device(device)), []
    trial.draw, trial.call_seed, trial.check_form = lambda: [torch.ones(4)], lambda: None, lambda *given: None
    # How long the candidate says that it takes decides nothing, and how long the judge waits for it does.
    sides = {name: WarmedSide(story, name, 1.0 if name == "candidate" else latency_us) for name in SIDES}
    sides["candidate"].seen_us = seen_us
    run = ProcessTriple(trial, trial.check, sides, lambda: 0.0)
    names = list(SIDES)
    run.round(names, hold=False, keep=False)
    assert story == [(name, 0) for name in names], "how long a call takes is not known yet"
    story.clear()
    run.round(names, hold=False, keep=True)
    assert story == [(name, repeats) for name in names]


@pytest.mark.exhaustive
def test_a_judge_that_repeats_calls_finds_the_same(shared_judge, warm_up_each_call):
    warm_up_each_call()
    same = Candidate(source=RELU.source.replace("class Model(", "class ModelNew("))
    found = shared_judge.evaluate(RELU, same, settings=Settings.quick(threads=1, **ANY_WAIT))
    assert found.accepted, found.detail
    late = Candidate(
        source=same.source.replace("def forward(self", "def forward(self", 1)
        + """
_forward = ModelNew.forward

def forward(self, *inputs):
    self.calls = getattr(self, "calls", 0) + 1
    return _forward(self, *inputs) + (self.calls > 30)

ModelNew.forward = forward
"""
    )
    assert not shared_judge.evaluate(RELU, late, settings=Settings.quick(threads=1)).accepted


@pytest.mark.parametrize(("device", "still"), [("cpu", 3), ("cuda", 0)])
def test_workers_on_a_processor_are_kept_still_between_calls(device, still):
    trial = FakeTrial(torch.device(device))
    trial.settings = trial.settings.model_copy(update={"warmup_calls": 1})
    run, stopped = run_of(trial), []
    for name, side in run.sides.items():
        side.worker.keep_still = lambda name=name: stopped.append(name)
        run.samples[name].idle_us.append(0.0)
    rounds = []
    run.round = lambda order, *, hold, keep: [
        rounds.append(stopped[:]),
        *(samples.idle_us.append(0.0) for samples in run.samples.values()),
    ]
    run.warm_up()
    assert sorted(stopped) == sorted(SIDES)[:still]
    assert rounds == ([[]] * triple.WATCHED_ROUNDS if still else [])


def test_what_works_between_calls_is_seen_before_it_is_kept_still():
    run = run_of()
    idle_us = {"reference": 10.0, "candidate": 9000.0, "null": 10.0}
    run.round = lambda order, *, hold, keep: [samples.idle_us.append(idle_us[name]) for name, samples in run.samples.items()]
    with pytest.raises(RejectionError) as caught:
        run.warm_up()
    assert caught.value.reason is Reason.WORK_OUTSIDE_TIMING


def test_equal_clocks_are_charged_nothing():
    found = filled().finish(3)
    assert len(found.blocks) == 4
    assert all(block.process == 3 for block in (*found.blocks, found.series))
    assert found.blocks[0].reference_us == found.blocks[0].candidate_us == found.blocks[0].null_us == (1000.0, 1000.0)
    assert found.summary["charged_us"] == 0.0


def test_time_that_only_the_outer_clock_sees_is_charged():
    found = filled(inner_us=500.0, audited_us=25.0).finish(0)
    assert found.summary["charged_us"] == pytest.approx(20.0)
    assert found.blocks[0].candidate_us == pytest.approx((520.0, 520.0))
    assert found.blocks[0].claimed_us == (500.0, 500.0)


def test_time_that_the_outer_clock_does_not_see_is_no_credit():
    assert filled(harness_us=10.0, audited_us=1.0).finish(0).blocks[0].candidate_us == (1000.0, 1000.0)


def test_single_calls_are_not_believed_to_be_much_faster_than_series():
    found = filled(inner_us=10.0, series_us=1000.0).finish(0)
    assert found.summary["least_us"] == pytest.approx(900.0)
    assert found.blocks[0].candidate_us == pytest.approx((900.0, 900.0))


@pytest.mark.parametrize("hidden", [{"harness_us": 600.0}, {"audited_us": 600.0}])
def test_much_time_that_only_the_outer_clock_sees_rejects(hidden):
    settings = FakeTrial().settings
    clocks.reject_hidden_time([filled().finish(0)] * 3, settings)
    cheat = filled(inner_us=10.0, **hidden).finish(0)
    with pytest.raises(RejectionError) as caught:
        clocks.reject_hidden_time([cheat] * 3, settings)
    assert caught.value.reason is Reason.CLOCK_DISAGREEMENT


@pytest.mark.parametrize(("hidden_us", "rejected"), [(700.0, True), (0.0, False)])
def test_load_that_disturbs_most_calls_of_both_sides_hides_no_time(hidden_us, rejected):
    calm = filled().finish(0)
    waits_us = [0.0, 0.0, 0.0, *(1000.0 * (1 + index) for index in range(5))]
    busy = replace(calm, harness_us=([wait + hidden_us for wait in waits_us], waits_us))
    assert clocks.certain_excess(*busy.harness_us) < 0
    with pytest.raises(RejectionError) if rejected else contextlib.nullcontext():
        clocks.reject_hidden_time([busy] * 3, FakeTrial().settings)


def test_one_process_that_was_disturbed_does_not_reject():
    calm, disturbed = filled().finish(0), filled(harness_us=5000.0, audited_us=5000.0).finish(0)
    clocks.reject_hidden_time([calm] * 3 + [disturbed], FakeTrial().settings)


def test_work_between_calls_rejects():
    with pytest.raises(RejectionError) as caught:
        filled(idle_us=9000.0).finish(0)
    assert caught.value.reason is Reason.WORK_OUTSIDE_TIMING
    filled(idle_us=2000.0).finish(0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_work_of_children_rejects(device):
    trial = FakeTrial(torch.device(device))
    with pytest.raises(RejectionError, match="child processes") as caught:
        filled(trial, helpers_us=1e15).finish(0)
    assert caught.value.reason is Reason.WORK_OUTSIDE_TIMING


def test_children_may_use_a_tenth_of_the_time_in_which_the_worker_ran():
    with pytest.raises(RejectionError, match="child processes"):
        filled(helpers_us=110_000.0).finish(0)
    filled(helpers_us=90_000.0).finish(0)


def test_a_device_that_is_busy_after_the_call_rejects():
    gpu = FakeTrial(torch.device("cuda"))
    with pytest.raises(RejectionError) as caught:
        filled(gpu, quiet_us=2000.0).finish(0)
    assert caught.value.reason is Reason.DEVICE_NOT_QUIET
    filled(gpu, quiet_us=600.0).finish(0)
    # Nothing of a worker that is kept still can slow what follows its call: that is another's doing.
    filled(quiet_us=2000.0).finish(0)


def test_outputs_of_timed_calls_must_be_near():
    trial = FakeTrial()
    run, wanted = run_of(trial), SimpleNamespace(outputs=[torch.ones(4)])
    inputs, allowed = [torch.zeros(4)], trial.check.timed_tolerance
    run.expect_near(SimpleNamespace(outputs=[torch.ones(4)]), wanted, "an output", allowed, inputs)
    with pytest.raises(RejectionError, match="an output") as caught:
        run.expect_near(SimpleNamespace(outputs=[torch.full((4,), 1.1)]), wanted, "an output", allowed, inputs)
    assert caught.value.reason is Reason.TIMED_OUTPUT_WRONG
    with pytest.raises(RejectionError):
        run.expect_near(SimpleNamespace(outputs=[torch.full((4,), math.nan)]), wanted, "an output", allowed, inputs)
    asked = []
    trial.check.bounds = SimpleNamespace(settles=lambda *given: asked.append(given) or True)
    run.expect_near(SimpleNamespace(outputs=[torch.full((4,), 1.1)]), wanted, "an output", allowed, inputs)
    assert [given[:2] for given in asked] == [(inputs, wanted.outputs)], "the truth of these very inputs has the last word"


def test_the_first_timed_output_must_still_be_there():
    run = run_of(held=[torch.ones(3)])
    run.held_call = list, [torch.ones(3)], []
    run.verify_held()
    assert all(side.held is None for side in run.sides.values()), "its memory is wanted"
    trial = FakeTrial()
    run = run_of(trial, held=[torch.ones(3)])
    run.held_call = list, [torch.zeros(3)], []
    with pytest.raises(RejectionError) as caught:
        run.verify_held()
    assert caught.value.reason is Reason.OUTPUT_OVERWRITTEN
    trial.findings.labels.add(Label.CUDA_GRAPH)
    run.verify_held()
    assert Label.ALIASED_OUTPUT in trial.findings.labels


def test_a_view_of_an_input_is_not_expected_to_last():
    trial = FakeTrial()
    trial.check.output_follows_input = True
    run = run_of(trial, held=[torch.ones(3)])
    run.held_call = list, [torch.zeros(3)], []
    run.verify_held()
    assert trial.findings.labels == set()


@pytest.mark.parametrize(
    ("wanted", "found", "settled", "far"),
    [
        (1.0, 1.0, False, False),
        (1.0, 2.0, False, True),
        (1.0, 2.0, True, False),
        (math.nan, 2.0, False, False),
    ],
    ids=["near", "far", "right by its truth", "outside the domain"],
)
def test_after_timing_an_output_is_far_unless_its_truth_or_its_domain_explains_it(wanted, found, settled, far):
    def side(value):
        answer = SimpleNamespace(outputs=[torch.full((4,), value)])
        return SimpleNamespace(
            load_state=lambda state: None,
            step=lambda state, names: None,
            read_state=dict,
            place=lambda inputs, slot: inputs,
            call=lambda placed, seed: answer,
        )

    trial = FakeTrial()
    trial.reloads_state, trial.oracle.parameter_names = True, ["weight"]
    trial.new_weights, trial.two_parts = dict, lambda: [{"weight"}]
    trial.draw, trial.call_seed = list, lambda: 1
    trial.check.bounds = SimpleNamespace(settles=lambda *given: settled)
    sides = {"reference": side(wanted), "candidate": side(found)}
    expected = pytest.raises(RejectionError, match="other weights loaded") if far else contextlib.nullcontext()
    with expected:
        ProcessTriple(trial, trial.check, sides, None).verify_weights(against_truth=False)
    assert trial.findings.labels == set()


@pytest.mark.parametrize("settled", [True, None, False])
def test_one_timed_output_is_held_to_the_truth_where_there_is_one(settled):
    trial = FakeTrial()
    trial.reloads_state = False
    trial.check.bounds = SimpleNamespace(has_float64=True, settles=lambda *given: settled)
    run = ProcessTriple(trial, trial.check, dict.fromkeys(SIDES, SimpleNamespace(release_idle=lambda: None)), None)
    run.held_call = list, [torch.ones(3)], [torch.ones(3)]
    is_wrong = (
        pytest.raises(RejectionError, match="further from the truth") if settled is False else contextlib.nullcontext()
    )
    with is_wrong:
        run.verify_weights(against_truth=True)


def test_ratios_are_paired_by_input_and_grouped_by_process():
    blocks = [
        TimingBlock(process=process, reference_us=(4.0, 8.0), candidate_us=(2.0, 2.0), null_us=(4.0, 4.0))
        for process in (0, 0, 1)
    ]
    log2 = math.log(2)
    assert [len(process) for process in log_ratios(blocks)] == [4, 2]
    assert log_ratios(blocks)[1] == pytest.approx([log2, 2 * log2])
    assert log_ratios(blocks, null=True)[1] == pytest.approx([0, log2])


@pytest.mark.parametrize(("noise", "processes", "miss_probability"), [(0.0, 2, 0.0125), (1.0, 4, 0.025)])
def test_processes_are_added_until_the_interval_is_narrow(noise, processes, miss_probability):
    seen = []

    def one(process, against_truth):
        seen.append(process)
        latencies = (100.0, 100.0 * (1 + noise * process))
        block = TimingBlock(process=process, reference_us=latencies, candidate_us=(50.0, 50.0), null_us=latencies)
        return triple_of(block)

    trial = FakeTrial()
    trial.settings = Settings(processes_min=2, processes_max=4, target_half_width=0.05)
    told = []
    found = Timed(trial, one, told.append).run()
    score, summaries = found
    assert seen == list(range(processes))
    assert told == [f"timing: {done + 1} of at most 4 process triples" for done in seen]
    assert Timed(trial, one).run() == found
    assert score.candidate_us == 50.0
    assert summaries == [{"process": process} for process in range(processes)]
    assert score.speedup.low <= score.speedup.estimate
    assert (score.scoring.miss_probability, len(score.series)) == (pytest.approx(miss_probability), processes)
    if noise == 0:
        assert score.speedup.estimate == pytest.approx(2.0)
        assert score.noise_floor == 0.0


class Timed(PairedTiming):
    """Times nothing: what a process triple gives is made."""

    def __init__(self, trial, made, progress=None):
        super().__init__(trial, trial.check, None, progress)
        self.made = made

    def triple(self, process, given, against_truth):
        return self.made(process, against_truth)


def triple_of(block, hidden_us=0.0):
    """What one process triple gives whose outer clock sees so much more of the candidate's calls, in single calls and in
    series alike."""
    reference_us, candidate_us = block.reference_us[0], block.candidate_us[0]
    series = TimingSeries(
        process=block.process,
        calls=16,
        reference_inner_us=(reference_us,) * 4,
        reference_outer_us=(reference_us + 1.0,) * 4,
        candidate_inner_us=(candidate_us,) * 4,
        candidate_outer_us=(candidate_us + 1.0 + hidden_us,) * 4,
    )
    block = block.model_copy(update={"claimed_us": block.candidate_us})
    single = ([1.0 + hidden_us] * 4, [1.0] * 4)
    return clocks.TripleClocks((block,), series, single, {"process": block.process})


def one_process(speedup=2.0, hidden_us=lambda process: 0.0, noise=0.0):
    """Stands in for a process triple whose outer clock sees so much more of the candidate's calls."""

    def one(process, against_truth):
        latency_us = 100.0 / speedup * (1 + noise * process)
        block = TimingBlock(
            process=process, reference_us=(100.0, 100.0), candidate_us=(latency_us,) * 2, null_us=(100.0, 100.0)
        )
        return triple_of(block, hidden_us(process))

    return one


def test_one_process_triple_of_the_first_is_held_to_the_truth_and_which_is_drawn():
    made, held = one_process(noise=0.01), []

    def notes(process, against_truth):
        if against_truth:
            held.append(process)
        return made(process, against_truth)

    trial = FakeTrial()
    trial.settings = Settings(processes_min=3, processes_max=6, target_half_width=1e-6)
    for times in range(1, 60):
        Timed(trial, notes).run()
        assert len(held) == times
        if set(held) == {0, 1, 2}:
            break
    assert set(held) == {0, 1, 2}


def test_a_process_that_was_disturbed_gets_a_second_chance():
    trial = FakeTrial()
    trial.settings = Settings(processes_min=1, processes_max=1)
    assert len(Timed(trial, one_process(hidden_us=lambda process: 5000.0 * (process == 0))).run()[0].blocks) == 2
    with pytest.raises(RejectionError) as caught:
        Timed(trial, one_process(hidden_us=lambda process: 5000.0)).run()
    assert caught.value.reason is Reason.CLOCK_DISAGREEMENT


def test_copying_an_output_out_of_other_strides_is_no_lie():
    trial = FakeTrial()
    trial.settings = Settings(processes_min=1, processes_max=1)
    trial.findings.labels = {Label.STRIDES_DIFFER}
    assert len(Timed(trial, one_process(hidden_us=lambda process: 5000.0)).run()[0].blocks) == 1


def test_what_is_certainly_slower_is_not_measured_to_a_per_cent():
    trial = FakeTrial()
    trial.settings = Settings(processes_min=2, processes_max=9, target_half_width=1e-9)
    for speedup, processes in ((0.5, 3), (2.0, 9)):
        assert len(Timed(trial, one_process(speedup, noise=0.01)).run()[0].blocks) == processes


@pytest.mark.parametrize(("until_certain", "speedup", "processes"), [(True, 2.0, 3), (False, 2.0, 9), (True, 1.001, 9)])
def test_a_first_measurement_ends_when_it_is_certain_that_a_candidate_is_faster(until_certain, speedup, processes):
    trial = FakeTrial()
    trial.settings = Settings(processes_min=3, processes_max=9, target_half_width=1e-9, until_certain=until_certain)
    found, _ = Timed(trial, one_process(speedup, noise=0.01)).run()
    assert len(found.blocks) == processes
    # It has looked once, and what it has seen may miss with no more than that look's share.
    assert found.scoring.miss_probability < MISS_PROBABILITY / 2 + 1e-9


@pytest.mark.parametrize(("rival_us", "processes"), [(90.0, 3), (30.0, 3), (50.5, 9)])
def test_a_first_measurement_goes_on_until_it_is_certain_on_which_side_of_the_fastest_beside_it_a_candidate_is(
    rival_us, processes
):
    made = one_process(2.0, noise=0.01)

    def with_rival(*given):
        triple = made(*given)
        block = triple.blocks[0].model_copy(update={"alongside_us": {"compile": (rival_us, rival_us)}})
        return replace(triple, blocks=(block,))

    trial = FakeTrial()
    trial.settings = Settings(processes_min=3, processes_max=9, target_half_width=1e-9, until_certain=True)
    found, _ = Timed(trial, with_rival).run()
    assert len(found.blocks) == processes


@pytest.mark.parametrize("measured", [1, 2, 4])
def test_one_whose_budget_is_spent_is_settled_by_what_was_measured(measured):
    trial, made = FakeTrial(), one_process(2.0, noise=0.01)
    trial.settings = Settings(processes_min=3, processes_max=9, target_half_width=1e-9)

    def spends(process, against_truth):
        if process == measured:
            raise WorkerError(Reason.TIMEOUT, "spent")
        return made(process, against_truth)

    if measured == 1:
        with pytest.raises(WorkerError):
            Timed(trial, spends).run()
        return
    found, _ = Timed(trial, spends).run()
    assert len(found.blocks) == measured
    assert trial.findings.checks["settled"] == f"after {measured} process triples: spent"


def test_long_calls_get_no_more_processes_than_they_must():
    trial = FakeTrial()
    trial.gate.held_s = 100.0  # of checks before
    trial.settings = Settings(processes_min=2, processes_max=6, target_half_width=1e-9)
    made = one_process(noise=0.01)

    def lasts(process, against_truth, alone_s):
        trial.gate.held_s += alone_s
        return made(process, against_truth)

    # Of the error probability, each look that could stop the run by its interval has spent a quarter of a half.
    for alone_s, processes, miss in ((9.0, 2, 0.05), (3.0, 4, 0.0375), (2.5, 4, 0.0375), (1.0, 6, 0.025)):
        found, _ = Timed(trial, functools.partial(lasts, alone_s=alone_s)).run()
        assert (len(found.blocks), found.scoring.miss_probability) == (processes, pytest.approx(miss))


def test_a_claim_holds_only_as_far_as_the_outer_clock_bears_it_out():
    claimed = Interval(10.0, 9.0, 11.0)
    assert scoring.confirmed(claimed, Interval(10.0, 9.5, 10.5), 0.0) == Interval(10.0, 9.0, 11.0)
    assert scoring.confirmed(claimed, Interval(9.0, 8.5, 9.5), 0.0) == Interval(9.5, 8.5, 11.0)
    assert scoring.confirmed(claimed, Interval(1.0, 0.9, 1.1), 0.0) == Interval(1.1, 0.9, 1.1)
    assert scoring.confirmed(claimed, Interval(20.0, 0.5, 40.0), 0.5) == Interval(10.0, 6.0, 11.0)
    assert scoring.confirmed(Interval(10.0, 10.0, 10.0), Interval(10.0, 9.0, 11.0), 0.0).low == 10.0


def outside(candidate_us, reference_us, charge_us):
    """Series whose calls take 100 us by the inner clock and so much outside it, and what was charged."""
    inner_us = (100.0,) * len(candidate_us)
    series = TimingSeries(
        process=0,
        calls=16,
        reference_inner_us=inner_us,
        reference_outer_us=tuple(100.0 + value for value in reference_us),
        candidate_inner_us=inner_us,
        candidate_outer_us=tuple(100.0 + value for value in candidate_us),
    )
    return series, Charge(audited_us=charge_us, slack_us=0.0, least_us=0.0)


def hidden_us(processes):
    return scoring.hidden_us(*zip(*processes, strict=True))


def test_what_the_outer_clock_sees_in_series_and_no_charge_explains_may_be_hidden():
    quiet = outside([50.0] * 9, [50.0] * 9, 0.0)
    assert hidden_us([quiet] * 3) == 0.0
    assert hidden_us([outside([80.0] * 9, [50.0] * 9, 0.0)] * 3) == pytest.approx(30.0)
    assert hidden_us([outside([80.0] * 9, [50.0] * 9, 30.0)] * 3) == pytest.approx(0.0)
    assert hidden_us([outside([10.0] * 9, [50.0] * 9, 0.0)] * 3) == 0.0  # faster outside is no credit
    # Student's t of 4 degrees of freedom at 99 %, times the error of a median of five whose median distance is 10.
    scattered = outside([30.0, 40.0, 50.0, 60.0, 70.0], [50.0] * 5, 0.0)
    assert hidden_us([scattered]) == pytest.approx(3.7469473879791964 * 1.2533 * 14.826 / math.sqrt(5))
    assert 0 < hidden_us([scattered] * 6) < hidden_us([scattered] * 2) <= 20


def test_chance_explains_more_where_clocks_scatter():
    assert scoring.slack_us([5.0] * 5, [7.0] * 5) == 0.0
    assert scoring.slack_us([1.0, 2, 3, 4, 5], [7.0] * 5) == pytest.approx(2 * 1.2533 * 1.4826 / math.sqrt(5))


def test_only_what_every_disturbed_call_shows_is_certain():
    quiet, disturbed = [10.0] * 8, [10.0] * 7 + [9000.0]
    assert clocks.certain_excess(disturbed, quiet) == 0.0
    assert clocks.certain_excess([50.0] * 8, disturbed) == 40.0


# --- the cache ------------------------------------------------------------------------------------


def test_a_flush_writes_something_else_each_time():
    flush = CacheFlush(CPU)
    values = []
    for _ in range(3):
        assert flush() >= 0
        values.append(int(flush.host[0]))
    assert flush.host.size == 2 * clocks.last_level_cache_bytes()
    assert len(set(values)) == 3
    assert {*flush.host.tolist()} == {values[-1]}


@pytest.mark.parametrize(
    ("texts", "size"),
    [([], 32 << 20), (["48K", "2048K", "33M"], 33 << 20), (["1024"], 1024), (["9999M"], 64 << 20)],
)
def test_the_largest_cache_counts(tmp_path, texts, size):
    for number, text in enumerate(texts):
        place = tmp_path / f"index{number}"
        place.mkdir()
        (place / "size").write_text(text + "\n")
    assert last_level_cache_bytes(tmp_path) == size


@pytest.mark.parametrize(("l2_mib", "size_mib"), [(50, 100), (4, 64)])
def test_a_flush_of_a_gpu_writes_twice_its_cache_and_waits(simulated_gpu, monkeypatch, l2_mib, size_mib):
    gpu, done = torch.device("cuda", 1), simulated_gpu.asked
    simulated_gpu.l2_bytes = l2_mib << 20
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: done.append((size, device)) or buffer)
    buffer = SimpleNamespace(fill_=done.append)
    flush = CacheFlush(gpu)
    flush()
    flush()
    assert done == [(size_mib << 20, gpu), 1, "synchronize", 2, "synchronize"]


# --- the state of the device ----------------------------------------------------------------------


def test_the_state_of_a_processor_is_its_load():
    assert len(devices.device_state(CPU)["load_average"].split()) == 3


class Driver:
    """NVML's functions of one GPU, as its library names them."""

    def __init__(self, uuid):
        self.uuid = uuid

    def __getattr__(self, name):
        return getattr(pynvml, name)  # constants and exceptions

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == self.uuid
        return "it"

    def nvmlDeviceGetClockInfo(self, gpu, which):
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[which]

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return 35

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 120_100

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=3, memory=1)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return 1


@pytest.fixture
def second_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device.index}"))
    return torch.device("cuda", 1)


def test_the_state_of_a_gpu_is_what_its_driver_says(monkeypatch, second_gpu):
    monkeypatch.setattr(devices, "pynvml", Driver("GPU-uuid-1"))
    assert devices.device_state(second_gpu) == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": 35,
        "power_w": 120.1,
        "utilization_pct": 3,
        "clock_event_reasons": "0x0000000000000001",
    }


@pytest.mark.parametrize("reason", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_UNKNOWN])
def test_without_a_driver_nothing_is_known(monkeypatch, second_gpu, reason):
    def fail():
        raise pynvml.NVMLError(reason)

    monkeypatch.setattr(devices.pynvml, "nvmlInit", fail)
    assert devices.device_state(second_gpu) == {}


@pytest.mark.parametrize(("sets", "processes", "blocks"), [(17, 2, 3), (17, 3, 6), (1, 1, 2), (5, 1, 2), (0, 2, 3)])
def test_every_input_set_of_the_check_comes_up_in_the_shortest_run(sets, processes, blocks):
    settings = Settings.quick(processes_min=processes, processes_max=processes, blocks=blocks)
    odd = timing.OddInputs([InputSet(str(index), lambda x, g: x, "") for index in range(sets)], settings)
    dealt = [odd.deal(block) for _ in range(processes) for block in range(blocks)]
    assert {one.name for hand in dealt for one in hand} == {str(index) for index in range(sets)}
    assert all(len(hand) == len(dealt[0]) for hand in dealt)
    further = [odd.deal(block) for block in range(blocks)]
    assert all(len(hand) == min(sets, 1) for hand in further)


def test_a_set_that_tells_precisions_comes_up_in_each_process():
    sets = [InputSet(str(index), lambda x, g: x, "") for index in range(40)]
    odd = timing.OddInputs(sets, settings := Settings.quick(), sets[:2])
    for _ in range(10):
        assert set(sets[:2]) & {one for block in range(settings.blocks) for one in odd.deal(block)}


def test_input_sets_come_up_in_an_order_nobody_can_know():
    sets = [InputSet(str(index), lambda x, g: x, "") for index in range(17)]
    orders = {tuple(one.name for one in timing.OddInputs(sets, Settings.quick()).deal(0)) for _ in range(20)}
    assert len(orders) > 1


def test_after_some_of_the_further_blocks_input_sets_come_up_and_nobody_knows_which():
    settings = Settings.quick()
    odd = timing.OddInputs([InputSet(str(index), lambda x, g: x, "") for index in range(17)], settings)
    asked = [[bool(odd.deal(settings.blocks + block)) for block in range(40)] for _ in range(2)]
    assert asked[0] != asked[1]
    assert all(0 < sum(one) < 40 for one in asked)
