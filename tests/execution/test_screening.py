"""Screening processes: what they estimate, and that a candidate that dies, hangs or leaks costs nothing but itself."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import CrowdedError, DeviceError, TaskError
from kernelwright.execution import screener as screeners
from kernelwright.execution.fork_servers import ForkServers
from kernelwright.execution.screener import SPARED_BYTES, Screener, device_limit_bytes
from kernelwright.execution.work import Progress, Screen
from kernelwright.judge import Settings
from kernelwright.judge.isolation.gate import DisturbedError
from kernelwright.judge.isolation.process import Worker, WorkerError
from kernelwright.records import Candidate, Reason, Task
from kernelwright.records.screened import Compiles
from tests.execution.fakes import shared_by_all
from tests.samples import diagonal, module

TASK = Task(id="diagonal", source=diagonal(512))
SETTINGS = Settings.quick(threads=1)

RIGHT = module()
WRONG = module("a[:, None] + b")
TRANSPOSED = module("(a[:, None] * b).mT.contiguous().mT")
RAISES = module("a @ b.nowhere")
DIES = module("__import__('os').kill(__import__('os').getpid(), 11)")
HANGS = module("__import__('time').sleep(1000)")
CHANGES_FLAGS = module("torch.use_deterministic_algorithms(True) or a[:, None] * b")
NO_MODULE = "class ModelNew: pass"
NO_PYTHON = "def broken(:"


@contextlib.contextmanager
def screening(task=TASK, settings=SETTINGS, slots=1):
    with contextlib.closing(ForkServers("cpu")) as servers, Screener(task, "cpu", settings, servers, slots) as made:
        yield made


@pytest.fixture(scope="module")
def screener(_one_fork_server):
    with Screener(TASK, "cpu", SETTINGS, shared_by_all(_one_fork_server()), slots=1) as made:
        yield made


def look(screener: Screener, *sources: str):
    found = {candidate.source: one for candidate, one in screener.screen(Candidate(source=source) for source in sources)}
    return [found[source] for source in sources]


def test_a_right_candidate_is_estimated_and_a_wrong_one_is_not(screener):
    right, wrong = look(screener, RIGHT, WRONG)
    assert (right.correct, right.reason) == (True, None)
    assert right.estimate > 0
    assert right.spread >= 0
    assert right.pairs >= 7
    assert right.candidate().sha256 == right.candidate_sha256 == Candidate(source=RIGHT).sha256
    assert (wrong.correct, wrong.reason, wrong.estimate) == (False, Reason.WRONG_OUTPUT, None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TRANSPOSED, Reason.WRONG_STRIDES),
        (RAISES, Reason.RUNTIME_ERROR),
        (NO_MODULE, Reason.NO_MODEL_NEW),
        (NO_PYTHON, Reason.SYNTAX_ERROR),
        (module("b * 1"), Reason.WRONG_OUTPUT),
        (module("(a[:, None] * b).half()"), Reason.WRONG_DTYPE),
        (module("(a[:, None] * b)[0]"), Reason.WRONG_SHAPE),
        (module("[a[:, None] * b]"), Reason.WRONG_TYPE),
        (module("b.mul_(a[:, None])"), Reason.INPUT_MUTATED),
    ],
)
def test_what_is_wrong_has_a_reason_code(screener, source, reason):
    (found,) = look(screener, source)
    assert (found.correct, found.reason) == (False, reason), found.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "reason"),
    [(DIES, Reason.CRASHED), (HANGS, Reason.RUN_TIMEOUT), (CHANGES_FLAGS, None)],
)
def test_after_a_crash_a_hang_or_changed_settings_the_next_candidate_has_a_fresh_process(source, reason):
    with screening(settings=SETTINGS.model_copy(update={"build_limit_s": 5.0, "run_limit_s": 3.0})) as screener:
        before, bad, after = look(screener, RIGHT, source, RIGHT + "\n")
    assert bad.reason == reason
    assert (before.correct, after.correct) == (True, True)
    assert [one.spent_s["task"] > 0.02 for one in (before, bad, after)] == [True, False, True]


@pytest.mark.exhaustive
def test_a_task_that_does_not_run_is_the_tasks_fault():
    broken = Task(id="broken", source=TASK.source.replace("torch.diag(a) @ b", "a @ nothing"))
    with screening(broken) as screener:
        (found,) = look(screener, RIGHT)
    assert isinstance(found, TaskError)


def test_one_that_has_a_gpus_memory_alone_may_have_nearly_all_of_it(on_gpu):
    limit = 2 * SETTINGS.device_memory_limit_bytes
    gpu = torch.device("cuda:0")
    on_gpu.total_memory = 140 << 30
    assert device_limit_bytes(SETTINGS, gpu, alone=True) == on_gpu.total_memory - SPARED_BYTES > limit
    assert device_limit_bytes(SETTINGS, gpu, alone=False) == limit
    on_gpu.total_memory = limit
    assert device_limit_bytes(SETTINGS, gpu, alone=True) == limit
    assert device_limit_bytes(SETTINGS, torch.device("cpu"), alone=True) == limit


# --- with workers that answer as a test says ----------------------------------------------------------------------------

TIMED = {"estimate": 2.0, "spread": 0.1, "pairs": 9, "reference_us": 1200.0, "candidate_us": 600.0}


class Workers:
    """Starts workers, and notes what they are asked.

    Args:
        answer: What is answered, by what is asked and the source of the candidate; an exception is raised.
    """

    is_single = False

    def __init__(self, answer=lambda op, source: None):
        self.answer, self.made, self.asked, self.servers = answer, [], [], []

    def start(self, server, spec, settings):
        self.made.append(FakeWorker(self, spec))
        return self.made[-1]

    @property
    def alive(self):
        return [worker for worker in self.made if not worker.ended]

    # as fork servers

    def server(self, *, compiling):
        self.servers.append(compiling)

    def keep_off(self, core):
        pass


class FakeWorker:
    is_trusted = Worker.is_trusted
    pid = None

    def __init__(self, workers, spec):
        self.workers, self.spec, self.ended, self.source = workers, spec, False, None

    def request(self, op, limit_s, **fields):
        gate = self.spec.gate
        # A block that shares the device lets none in that is alone.
        place = "alone" if gate.alone else "shared" if gate._shared else "beside"
        self.workers.asked.append((op, place, limit_s, self.is_trusted))
        self.source = fields.get("source", self.source)
        answer = self.workers.answer(op, self.source)
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is not None else {"time": TIMED, "next": CLEAN}.get(op, {})

    def discard(self):
        self.ended = True

    def stop(self):
        return False


CLEAN = {"clean": True, "resident_bytes": 0, "device_bytes": 0}


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU that is not there, and its memory."""
    properties = SimpleNamespace(total_memory=140 << 30, uuid="none")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch):
    """Workers that are no processes take no signals."""
    signal_each = screeners.signal_each
    monkeypatch.setattr(screeners, "signal_each", lambda pids, number: signal_each([pid for pid in pids if pid], number))


def faked(workers, device="cpu", slots=1, **options):
    return Screener(TASK, device, SETTINGS, workers, slots, start=workers.start, **options)


def outcomes(workers, *sources, device="cpu", slots=1, **options):
    with faked(workers, device, slots, **options) as screener:
        return look(screener, *sources)


def test_the_reference_makes_way_for_those_who_measure_and_is_not_ended_for_it():
    """In float64 it is at work for seconds, and what was timed beside it read twice as long."""
    workers = Workers(lambda op, source: {"least_us": 1.0, "operations_us": 3.0} if op == "truth" else None)
    (found,) = outcomes(workers, RIGHT)
    assert [(op, place, is_trusted) for op, place, _, is_trusted in workers.asked][:3] == [
        ("task", "beside", True),
        ("truth", "shared", True),
        ("build", "beside", False),
    ], "candidates' code runs in it from then on"
    assert (found.least_us, found.operations_us) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("device", "reference_us", "place"), [("cuda", 1200.0, "alone"), ("cuda", 90.0, "shared"), ("cpu", None, "shared")]
)
def test_long_calls_have_a_gpu_alone_while_they_are_timed(on_gpu, device, reference_us, place):
    workers = Workers(lambda op, source: {"reference_us": reference_us} if op == "truth" else None)
    (found,) = outcomes(workers, RIGHT, device=device)
    assert found.estimate == 2.0
    places = {op: (place, limit_s) for op, place, limit_s, _ in workers.asked}
    assert [places[op][0] for op in ("build", "call", "check", "time")] == ["beside", "shared", "shared", place]
    limit_s = min(SETTINGS.run_limit_s, 5.12)
    assert places["time"][1] == pytest.approx(limit_s if place == "alone" else SETTINGS.run_limit_s)


def test_one_whose_process_was_ended_for_anothers_kernels_is_looked_at_again():
    errors = iter([DisturbedError("others")])
    workers = Workers(lambda op, source: next(errors, None) if op == "check" else None)
    (found,) = outcomes(workers, RIGHT)
    assert found.correct
    first, second = workers.made
    assert first.spec.gate is not second.spec.gate


def test_one_for_whose_kernels_others_waited_too_long_is_no_good():
    errors = iter([CrowdedError("work on the GPU went on for 10 s.")])
    found = outcomes(Workers(lambda op, source: next(errors, None) if op == "check" else None), RIGHT, WRONG)
    assert [one.correct for one in found] == [False, True]
    assert (found[0].reason, found[0].detail) == (Reason.RUN_TIMEOUT, "work on the GPU went on for 10 s.")


@pytest.mark.parametrize(
    "left", [{"clean": False}, {"resident_bytes": 4 << 30}, {"device_bytes": 2 << 30}, WorkerError(Reason.CRASHED, "gone")]
)
def test_a_process_that_is_not_as_it_was_is_replaced(left):
    answer = left if isinstance(left, Exception) else CLEAN | left
    workers = Workers(lambda op, source: answer if op == "next" else None)
    assert all(found.correct for found in outcomes(workers, RIGHT, WRONG))
    assert len(workers.made) >= 2


def test_what_an_untrusted_process_names_is_checked():
    for op, answer, reason in (
        ("check", {"reason": "no-such-reason"}, Reason.PROTOCOL_VIOLATION),
        ("check", {"reason": str(Reason.WRONG_OUTPUT)}, Reason.WRONG_OUTPUT),
        ("time", TIMED | {"estimate": True}, Reason.PROTOCOL_VIOLATION),
        ("time", TIMED | {"estimate": 1e300}, Reason.PROTOCOL_VIOLATION),
    ):
        (found,) = outcomes(Workers(lambda asked, source, op=op, answer=answer: answer if asked == op else None), RIGHT)
        assert (found.correct, found.reason) == (False, reason)


SOURCES = [module(note=note) for note in ("", "triton", "torch.compile")]


@pytest.mark.parametrize(("device", "compiling"), [("cpu", [False, False, True]), ("cuda:0", [False, True, True])])
def test_on_a_gpu_whatever_compiles_is_forked_from_the_server_with_the_compiler(on_gpu, device, compiling):
    for source, wanted in zip(SOURCES, compiling, strict=True):
        workers = Workers()
        with faked(workers, device, slots=2, early=False) as screener:
            look(screener, source)
        assert workers.servers.count(True) == wanted


@pytest.mark.parametrize(
    ("device", "slots", "early", "wanted"),
    [("cuda:0", 8, True, 4), ("cuda:0", 2, True, 2), ("cuda:0", 8, False, 1), ("cpu", 4, True, 1)],
)
def test_on_a_gpu_some_processes_for_compilers_start_before_there_is_a_candidate(on_gpu, device, slots, early, wanted):
    workers = Workers()
    with faked(workers, device, slots, early=early) as screener:
        while len(workers.made) < wanted:
            pass
        look(screener, RIGHT)
    assert sorted(workers.servers) == [False, *[True] * (wanted - 1)]


def test_what_compiles_nothing_waits_for_the_first_process_and_compilers_take_any():
    free = {}

    def candidates(screener):
        for source in SOURCES[:2]:
            yield Candidate(source=source)
            free[source] = [kind for kind in Compiles if screener.takes(kind)]

    may_end = threading.Event()
    workers = Workers(lambda op, source: may_end.wait(60) and None if op == "build" else None)
    with faked(workers, slots=3) as screener:
        assert all(screener.takes(kind) for kind in Compiles)
        found = screener.screen(candidates(screener))
        threading.Timer(0.2, may_end.set).start()
        assert len(list(found)) == 2
    assert [*free.values()] == [[Compiles.CODE, Compiles.INDUCTOR, Compiles.VARIANTS]] * 2


def test_what_runs_out_of_memory_beside_other_processes_is_tried_again_when_they_have_ended():
    seen, together, alive = set(), threading.Barrier(2), []

    def answer(op, source):
        if op != "check":
            return None
        if source in seen:
            alive.append(len(workers.alive))
            return {}
        seen.add(source)
        together.wait(60)
        if source == SOURCES[1]:
            return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.")  # the gate's own, say
        return WorkerError(Reason.OUT_OF_MEMORY, "it is full")

    workers = Workers(answer)
    found = outcomes(workers, *SOURCES[:2], slots=2)
    assert [one.correct for one in found] == [True, True]
    assert alive == [1, 1], "no other holds the task"


def test_what_runs_out_of_memory_alone_says_so():
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 600.00 GiB.\nProcess 1 has 6 GiB")
    (error,) = outcomes(Workers(lambda op, source: full if op == "check" else None), RIGHT, slots=2)
    assert isinstance(error, DeviceError)
    assert str(error).endswith("out-of-memory: CUDA out of memory. Tried to allocate 600.00 GiB.")


# --- rounds -----------------------------------------------------------------------------------------------------------


class TwoIdeas:
    name = "two"

    def propose(self, context, count):
        return [candidate for candidate in map(idea, SOURCES) if candidate.sha256 not in context.seen][:count]


def idea(source):
    return Candidate(source=source, policy="two", techniques=("idea",))


def round_of(workers, work, **options):
    messages = []
    with faked(workers, slots=2, **options) as screener:
        return [*screener.look(work, messages.append)], messages


def test_a_round_looks_at_what_the_policy_proposes_and_says_what_is_left():
    found, messages = round_of(Workers(), Screen(TASK, TwoIdeas(), budget=2))
    assert {one.candidate_sha256 for one, _ in found} == {idea(source).sha256 for source in SOURCES[:2]}
    assert found[-1][1] is None
    assert Progress("proposing") in messages
    again, _ = round_of(Workers(), Screen(TASK, TwoIdeas(), budget=2, earlier=[one for one, _ in found]))
    assert again == []


def test_a_round_of_given_candidates_looks_at_these():
    found, messages = round_of(Workers(), Screen(TASK, candidates=(idea(RIGHT), idea(WRONG))))
    assert {one.candidate_sha256 for one, _ in found} == {idea(RIGHT).sha256, idea(WRONG).sha256}
    assert messages == []


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_round_that_runs_out_of_memory_beside_others_ends_so_that_it_can_be_tried_beside_fewer(is_alone):
    workers = Workers(lambda op, source: WorkerError(Reason.OUT_OF_MEMORY, "it is full") if op == "check" else None)
    work = Screen(TASK, TwoIdeas(), budget=1)
    if is_alone:
        ((found, _),), _ = round_of(workers, work, is_alone=True)
        assert found.reason is Reason.OUT_OF_MEMORY
    else:
        with pytest.raises(DeviceError, match="it is full"):
            round_of(workers, work)
