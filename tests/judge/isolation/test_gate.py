"""The device for one, or for those who measure nothing."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch

from kernelwright.errors import CrowdedError
from kernelwright.judge.isolation import gate as gate_module
from kernelwright.judge.isolation.gate import DeviceGate, DeviceMemory, DisturbedError, lock_path
from tests.quick import exhaustive_but

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def entered(way_in, *, while_held, wait_s=0.1) -> bool:
    """Whether another evaluation gets in while `while_held` holds the device, within a time that is long where it should."""
    inside, leave = threading.Event(), threading.Event()

    def enter():
        with way_in:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=enter)
    with while_held:
        thread.start()
        got_in = inside.wait(wait_s)
    assert inside.wait(10), "it gets in once the other has left"
    leave.set()
    thread.join()
    return got_in


@pytest.mark.parametrize(
    ("first", "second", "together"),
    exhaustive_but(
        [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
        (True, False, False),
        (True, True, True),
    ),
)
def test_only_those_who_measure_nothing_are_in_together(first, second, together):
    ways = DeviceGate(CPU)(shared=second), DeviceGate(CPU)(shared=first)
    assert entered(ways[0], while_held=ways[1], wait_s=10.0 if together else 0.1) is together


@pytest.mark.parametrize(
    ("first", "second", "together"),
    exhaustive_but(
        [(False, False, True), (False, True, False), (True, False, False), (True, True, False)],
        (False, False, True),
        (True, False, False),
    ),
)
def test_one_may_have_the_memory_alone(first, second, together):
    memory = DeviceMemory(CPU)
    wait_s = 10.0 if together else 0.1
    assert entered(memory(alone=second), while_held=memory(alone=first), wait_s=wait_s) is together


@pytest.mark.parametrize("alone", [False, True])
def test_whoever_waits_for_one_that_is_alone_gives_back_its_own_first(alone):
    given_back = []
    memory, other = DeviceMemory(CPU, lambda: given_back.append("waits")), DeviceMemory(CPU)
    assert not entered(memory(alone=alone), while_held=other(alone=True))
    assert given_back == ["waits"]


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_alone_gives_back_its_own_and_what_shares_keeps_it(alone):
    given_back = []
    memory, other = DeviceMemory(CPU, lambda: given_back.append("alone")), DeviceMemory(CPU)
    with contextlib.nullcontext() if alone else other(), memory(alone=alone):
        assert given_back == ["alone"] * alone


@pytest.mark.parametrize("kind", [DeviceGate, DeviceMemory])
def test_who_comes_after_one_that_waits_to_be_alone_waits_too(kind):
    turns, order = kind(CPU), []

    def enter(alone):
        return turns(alone=alone) if kind is DeviceMemory else turns(shared=not alone)

    def use(name, alone):
        with enter(alone):
            order.append(name)

    waiting = threading.Thread(target=use, args=("alone", True))
    later = threading.Thread(target=use, args=("later", False))
    with enter(False):
        waiting.start()
        while not is_locked(turns.turn):
            pass
        later.start()
        later.join(0.2)
        assert order == []
    waiting.join()
    later.join()
    assert order == ["alone", "later"]


def is_locked(path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_was_held_alone_and_time_in_front_of_the_gate_are_counted():
    gate = DeviceGate(CPU)
    with gate(shared=True):
        pass
    assert gate.held_s == 0.0
    assert gate.waited_s > 0
    for _ in range(2):
        before = gate.held_s, gate.waited_s
        with contextlib.suppress(ValueError), gate():
            raise ValueError
        assert gate.held_s > before[0]
        assert gate.waited_s > before[1]


def test_the_lock_of_a_gpu_is_named_after_it(simulated_gpu):
    assert lock_path(torch.device("cuda", 0), "").name == f"kernelwright-gpu-{simulated_gpu.uuid}.lock"
    assert lock_path(CPU, "").name == "kernelwright-cpu.lock"


class FakeWorker:
    """Writes down what is done to it."""

    def __init__(self, done, is_trusted=False):
        self.done, self.is_trusted, self.stopped = done, is_trusted, False

    def stop(self):
        self.done.append("stop")
        was, self.stopped = self.stopped, True
        return not was

    def resume(self):
        self.stopped = False
        self.done.append("resume")

    def close(self):
        self.done.append("close")


@pytest.fixture
def measuring():
    """Starts an evaluation that wants the device alone, and waits until others can see that it does."""
    threads = []

    def start(gate, done):
        def measure():
            with gate():
                done.append("measured")

        threads.append(threading.Thread(target=measure))
        threads[-1].start()
        while not is_locked(gate.turn):
            pass

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("shared", [True, False], ids=["in a block", "while it is built"])
def test_a_request_is_stopped_for_one_that_measures_and_then_goes_on(measuring, shared):
    done, gate = [], DeviceGate(CPU)
    with gate(shared=True) if shared else contextlib.nullcontext(), gate.request() as lock:
        assert gate.stand_aside(lock, FakeWorker(done)) == 0.0
        assert done == []
        measuring(DeviceGate(CPU), done)
        assert gate.stand_aside(lock, FakeWorker(done)) > 0.0
    assert done == ["stop", "measured", "resume"]


def test_all_requests_of_one_block_are_stopped(measuring):
    done, gate = [], DeviceGate(CPU)
    with gate(shared=True):
        with gate.request() as first, gate.request() as second:
            measuring(DeviceGate(CPU), done)
            one = threading.Thread(target=gate.stand_aside, args=(first, FakeWorker(done)))
            one.start()
            gate.stand_aside(second, FakeWorker(done))
            one.join()
        assert sorted(done) == ["measured", "resume", "resume", "stop", "stop"]
        assert done.index("measured") > 1
        assert not entered_now(DeviceGate(CPU)), "the block's own lock is back"


def test_long_work_of_a_judge_makes_way_for_one_that_measures_and_has_its_lock_back(measuring):
    done, gate = [], DeviceGate(CPU)
    gate.give_way()  # outside of any block there is nothing to give
    with gate(shared=True):
        gate.give_way()
        assert not entered_now(DeviceGate(CPU)), "nobody waited"
        measuring(DeviceGate(CPU), done)
        assert done == []
        gate.give_way()
        assert done == ["measured"]
        assert not entered_now(DeviceGate(CPU)), "the block's own lock is back"


def test_who_measures_gives_no_way():
    gate, others = DeviceGate(CPU), DeviceGate(CPU)
    with gate():
        waiting = threading.Thread(target=lambda: others(shared=True).__enter__())
        waiting.start()
        gate.give_way()
        assert gate.alone
        assert others.waited_s == 0.0
    waiting.join()


def entered_now(gate) -> bool:
    """Whether nobody shares the device."""
    with gate._path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_workers_of_one_that_waits_are_stopped_as_long():
    done, gate = [], DeviceGate(CPU)
    gate.workers.append(FakeWorker(done))
    with gate():
        assert done == []
    inside = threading.Thread(target=lambda: gate(shared=True).__enter__())
    with DeviceGate(CPU)():
        inside.start()
        while not done:
            pass
        assert done == ["stop"]
    inside.join()
    assert done == ["stop", "resume"]


def test_a_request_while_the_device_is_alone_or_a_gpu_builds_has_no_lock(simulated_gpu):
    gate = DeviceGate(torch.device("cuda", 0))
    with gate.request() as lock:
        assert lock is None
    with gate(shared=True), gate.request() as lock:
        assert lock is not None
    with gate(), gate.request() as lock:
        assert lock is None


@pytest.fixture
def gpu(monkeypatch):
    """A gate of a GPU, which is quiet as the list says, and then as its last entry says."""

    def gate(quiet, limit_s=0.0):
        def is_quiet(self):
            return quiet.pop(0) if len(quiet) > 1 else quiet[0]

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
        monkeypatch.setattr(DeviceGate, "is_quiet", is_quiet)
        monkeypatch.setattr(gate_module, "_ENDING_S", 0.0)
        monkeypatch.setattr(gate_module.time, "sleep", lambda seconds: None)
        return DeviceGate(torch.device("cuda", 0), limit_s)

    return gate


def aside(gate, worker, measuring):
    with gate(shared=True), gate.request() as lock:
        measuring(DeviceGate(torch.device("cuda", 0)), worker.done)
        gate.stand_aside(lock, worker)


@pytest.mark.parametrize(
    ("quiet", "error", "said"),
    [([False, False, True], CrowdedError, "went on for 0 s"), ([False], DisturbedError, "for another process")],
    ids=["its own, to be tried alone", "another one's, to be tried again"],
)
def test_a_worker_is_ended_for_kernels_that_do_not_end(gpu, measuring, quiet, error, said):
    worker = FakeWorker([])
    with pytest.raises(error, match=said):
        aside(gpu(quiet), worker, measuring)
    assert worker.done[:2] == ["stop", "close"]


@pytest.mark.parametrize(
    ("quiet", "limit_s", "trusted"),
    [([False, True], 60.0, False), ([False, False], 0.0, True), ([False], None, False), ([False, True], 0.0, False)],
    ids=["it ends", "trusted", "not looked at", "another one was ended"],
)
def test_one_whose_kernels_end_or_are_not_its_own_lives(gpu, measuring, quiet, limit_s, trusted):
    worker = FakeWorker([], trusted)
    aside(gpu(quiet, limit_s), worker, measuring)
    assert worker.done == ["stop", "measured", "resume"]


@pytest.mark.exhaustive
def test_one_that_dies_while_it_measures_keeps_nobody_stopped():
    program = (
        "import sys, time, torch; from kernelwright.judge.isolation.gate import DeviceGate; import tempfile;"
        "tempfile.tempdir = sys.argv[1]; print('near', flush=True)\n"
        "with DeviceGate(torch.device('cpu'))(): print('in', flush=True); time.sleep(1000)"
    )
    done, gate = [], DeviceGate(CPU)
    with gate(shared=True), gate.request() as lock:
        other = subprocess.Popen([sys.executable, "-c", program, tempfile.gettempdir()], stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "near\n"
        while not is_locked(gate.turn):
            pass

        def kill():
            done.append(other.stdout.readline().strip())
            other.kill()
            other.wait()

        killing = threading.Thread(target=kill)
        killing.start()
        gate.stand_aside(lock, FakeWorker(done))
        killing.join()
    assert done == ["stop", "in", "resume"]
