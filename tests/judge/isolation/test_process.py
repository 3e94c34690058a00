"""The parent's handle on a worker, with the other end of the channel in the test's hands."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace

import pytest

from kernelwright.judge import Settings
from kernelwright.judge.isolation import process
from kernelwright.judge.isolation.process import CallBudget, Worker, WorkerError, WorkerSpec
from kernelwright.judge.isolation.sandbox import Ending
from kernelwright.judge.worker.channel import ChannelClosedError, ChannelGarbageError, ChannelTimeoutError, decode, encode
from kernelwright.records import Reason


class FakeForkServer:
    """Spawns nothing; ends as it is told."""

    def __init__(self):
        self.ended = []
        self.ending = Ending(0, None)

    def spawn(self, config, files):
        self.config = config
        return os.getpid()

    def end(self, pid, grace_s=0.0):
        self.ended.append(pid)
        return self.ending


class FakeChannel:
    """Answers each request with `reply(request)`, an object to send or an exception to raise."""

    def __init__(self, reply):
        self.reply = reply
        self.unread = False

    def pending(self):
        return self.unread

    def send_encoded(self, data):
        self.request = decode(data[4:])

    def receive_encoded(self, deadline):
        self.deadline = deadline
        answer = self.reply(self.request)
        if isinstance(answer, Exception):
            raise answer
        return encode(answer)[4:] if isinstance(answer, dict) else answer

    def close(self):
        pass


@pytest.fixture
def made(tmp_path):
    fork_server = FakeForkServer()
    spec = WorkerSpec(
        role="candidate",
        source="",
        class_name="ModelNew",
        device="cpu",
        directory=tmp_path,
        build=tmp_path / "build",
        arena_bytes={"inputs": 512},
        gate=FakeGate(alone=True),
    )
    worker = Worker(fork_server, spec, Settings.quick(threads=1))
    yield worker, fork_server
    worker.discard()


def answering(made, reply):
    worker, _ = made
    worker.channel = FakeChannel(reply)
    return worker


def good(request):
    return {"nonce": request["nonce"], "inner_us": 2.5, "x": 1}


def failure(worker, op="call"):
    with pytest.raises(WorkerError) as caught:
        worker.request(op, 5.0)
    return caught.value


def test_an_answer_with_its_requests_nonce_is_an_answer(made):
    worker = answering(made, good)
    answer, clocks = worker.exchange("call", 5.0, layout=3, seed=7)
    assert answer["x"] == 1
    assert worker.channel.request["layout"] == 3
    assert worker.channel.request["seed"] == 7
    assert "hold" not in worker.channel.request, "a module could read in advance that it will be looked at again"
    assert clocks.inner_us == 2.5
    assert clocks.outer_us > 0
    assert clocks.idle_us == 0
    assert worker.exchange("call", 5.0, layout=3, seed=None)[1].idle_us >= 0


def test_every_request_has_another_nonce(made):
    seen = set()

    def remember(request):
        seen.add(request["nonce"])
        return good(request)

    worker = answering(made, remember)
    for _ in range(20):
        worker.request("release", 5.0)
    assert len(seen) == 20
    assert all(len(nonce) >= 16 for nonce in seen)


@pytest.mark.parametrize("nonce", ["", "0" * 16, None, 5])
def test_an_answer_with_another_nonce_is_a_violation_unless_nobody_looks(made, monkeypatch, nonce):
    worker = answering(made, lambda request: {**good(request), "nonce": nonce})
    assert failure(worker).reason is Reason.PROTOCOL_VIOLATION


def test_an_answer_to_the_request_before_is_a_violation(made):
    nonces = []

    def late(request):
        nonces.append(request["nonce"])
        return {**good(request), "nonce": nonces[0]}

    worker = answering(made, late)
    worker.request("release", 5.0)
    assert failure(worker).reason is Reason.PROTOCOL_VIOLATION


def test_an_answer_before_its_request_is_a_violation(made):
    worker = answering(made, good)
    worker.channel.unread = True
    assert failure(worker).reason is Reason.PROTOCOL_VIOLATION
    assert not hasattr(worker.channel, "request")


def test_without_both_looks_a_prepared_answer_would_pass(made, monkeypatch):
    monkeypatch.setattr(process.secrets, "token_hex", lambda count: "00" * count)
    worker = answering(made, lambda request: {"nonce": "00" * 8, "inner_us": 0.001})
    assert worker.exchange("call", 5.0, layout=0, seed=None)[1].inner_us == 0.001


@pytest.mark.parametrize(
    ("op", "event", "reason", "words"),
    [
        ("call", ChannelTimeoutError(), Reason.RUN_TIMEOUT, "within 5 s"),
        ("build", ChannelTimeoutError(), Reason.BUILD_TIMEOUT, "`build`"),
        ("call", ChannelGarbageError("not JSON"), Reason.PROTOCOL_VIOLATION, "not JSON"),
        ("call", b"[]", Reason.PROTOCOL_VIOLATION, "not an object"),
    ],
)
def test_what_is_no_answer_has_a_reason_and_ends_the_worker(made, op, event, reason, words):
    worker = answering(made, lambda request: event)
    found = failure(worker, op)
    assert found.reason is reason
    assert words in found.detail
    assert made[1].ended == [os.getpid()]
    assert worker.arenas == {}


@pytest.mark.parametrize("latency", ["1", None, -1.0, 1e13, float("nan"), [1]])
def test_a_latency_must_be_a_time(made, latency):
    worker = answering(made, lambda request: {**good(request), "inner_us": latency})
    assert failure(worker).reason is Reason.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("op", "kind", "reason"),
    [
        ("build", "SyntaxError", Reason.SYNTAX_ERROR),
        ("build", "ValueError", Reason.BUILD_FAILED),
        ("call", "SyntaxError", Reason.RUNTIME_ERROR),
        ("call", "ValueError", Reason.RUNTIME_ERROR),
        ("call", "SystemExit", Reason.EXITED),
        ("build", "SystemExit", Reason.EXITED),
        ("call", "MemoryError", Reason.OUT_OF_MEMORY),
        ("call", "OutOfMemoryError", Reason.OUT_OF_MEMORY),
        ("load_state", "RuntimeError", Reason.STATE_MISMATCH),
        ("save_state", "KeyError", Reason.STATE_MISMATCH),
        ("inspect", "KeyError", Reason.RUNTIME_ERROR),
    ],
)
def test_an_exception_over_there_has_a_reason_here(made, op, kind, reason):
    error = {"type": kind, "message": "what", "trace": "where"}
    worker = answering(made, lambda request: {"nonce": request["nonce"], "error": error})
    found = failure(worker, op)
    assert found.reason is reason
    assert "what" in found.detail
    assert made[1].ended == []  # it lives and can be asked again


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Reason.OUT_OF_MEMORY),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", Reason.RUNTIME_ERROR),
    ],
)
def test_a_library_without_memory_for_its_handle_ran_out_of_memory(made, message, reason):
    error = {"type": "RuntimeError", "message": message, "trace": "where"}
    worker = answering(made, lambda request: {"nonce": request["nonce"], "error": error})
    assert failure(worker, "call").reason is reason


@pytest.mark.parametrize(
    ("ending", "reason", "words"),
    [
        (Ending(-signal.SIGSEGV, None), Reason.CRASHED, "SIGSEGV"),
        (Ending(-signal.SIGKILL, None), Reason.CRASHED, "killed or closed"),
        (Ending(-signal.SIGKILL, "memory"), Reason.OUT_OF_MEMORY, "2 GiB"),
        (Ending(-signal.SIGKILL, "processes"), Reason.TOO_MANY_PROCESSES, "128"),
        (Ending(5, None), Reason.EXITED, "status 5"),
    ],
)
def test_a_death_has_a_reason(made, ending, reason, words):
    made[1].ending = ending
    worker = answering(made, lambda request: ChannelClosedError())
    found = failure(worker)
    assert found.reason is reason
    assert words in found.detail
    worker.close()
    assert len(made[1].ended) == 1


def test_a_worker_is_told_what_it_is_and_nothing_secret(made):
    _, fork_server = made
    assert set(fork_server.config) == {
        "role",
        "program",
        "source",
        "class",
        "device",
        "private",
        "build",
        "threads",
        "strict_fp32",
        "memory_limit_bytes",
        "device_memory_limit_bytes",
        "process_limit",
        "file_limit_bytes",
        "arenas",
    }


def test_the_clock_of_another_process_and_of_none(made):
    worker, _ = made
    before = worker.cpu_us()
    sum(range(100_000))
    assert worker.cpu_us() > before
    with pytest.raises(OSError, match="No such process"):
        process.process_clock(2**22 + 1)
    worker.cpu_clock = -1
    assert worker.cpu_us() == 0.0


def test_helpers_are_the_other_members_of_the_session(made, monkeypatch):
    worker, _ = made
    monkeypatch.setattr(process, "session_members", lambda pid: [worker.pid, os.getppid(), 2**22 + 1])
    assert worker.helpers_cpu_us() > 0
    monkeypatch.setattr(process, "session_members", lambda pid: [worker.pid])
    assert worker.helpers_cpu_us() == 0


@pytest.fixture
def sent(made, monkeypatch):
    """Signals that went to the worker, which has one child."""
    signals = []
    monkeypatch.setattr(process, "session_members", lambda pid: [pid, 17])
    monkeypatch.setattr(process, "signal_each", lambda pids, number: signals.append((pids, number)))
    return signals


def test_a_worker_is_stopped_once_with_all_that_it_starts_meanwhile(made, monkeypatch):
    worker, _ = made
    found, signals = [[worker.pid, 17], [worker.pid, 17, 18], [worker.pid, 17, 18]], []
    monkeypatch.setattr(process, "session_members", lambda pid: found.pop(0))
    monkeypatch.setattr(process, "signal_each", lambda pids, number: signals.append((list(pids), number)))
    assert worker.stop()
    assert not worker.stop()
    worker.resume()
    assert signals[-2:] == [([18], signal.SIGSTOP), ([worker.pid, 17, 18], signal.SIGCONT)]


def test_a_budget_counts_what_the_candidate_takes_beyond_the_reference_and_ends_once():
    budget = CallBudget(10.0)
    budget.charge("reference", 5.0)
    budget.charge("candidate", 14.0)
    budget.charge("baseline", 100.0)
    with pytest.raises(WorkerError, match="its calls took 11 s more than the reference's; an evaluation allows 10 s"):
        budget.charge("candidate", 2.0)
    budget.charge("candidate", 2.0)


class FakeGate:
    """Of an evaluation that stands aside for so long whenever it is asked."""

    def __init__(self, alone=False, stands_aside_s=0.0):
        self.alone, self.workers, self.stands_aside_s, self.asked = alone, [], stands_aside_s, 0

    @contextlib.contextmanager
    def request(self):
        yield None if self.alone else "lock"

    def stand_aside(self, lock, worker):
        assert lock == "lock"
        self.asked += 1
        return self.stands_aside_s


class SlowChannel(FakeChannel):
    """Has an answer after so many looks."""

    def __init__(self, looks):
        super().__init__(good)
        self.looks, self.unread = looks, False

    def pending(self, wait_s=None):
        if wait_s is not None:
            self.looks -= 1
        return wait_s is not None and self.looks < 0


def test_time_for_which_it_was_stopped_is_no_part_of_its_limit(made):
    worker, _ = made
    worker.channel, gate = SlowChannel(looks=3), FakeGate(stands_aside_s=1000.0)
    worker.spec = replace(worker.spec, gate=gate)
    _, clocks = worker.exchange("call", 5.0)
    assert gate.asked == 3
    assert clocks.outer_us < 0, "the time is made up"


def test_one_that_does_not_answer_in_its_own_time_has_a_reason(made):
    worker, _ = made
    worker.channel = SlowChannel(looks=10**9)
    worker.spec = replace(worker.spec, gate=FakeGate())
    with pytest.raises(WorkerError) as caught:
        worker.request("call", 0.0)
    assert (caught.value.reason, caught.value.detail) == (Reason.RUN_TIMEOUT, "no answer to `call` within 0 s")


def test_one_that_is_timed_is_not_looked_at_while_it_answers(made):
    worker, _ = made
    worker.channel = FakeChannel(good)
    worker.spec = replace(worker.spec, gate=FakeGate(alone=True))
    assert worker.request("call", 5.0)["x"] == 1


def test_workers_of_an_evaluation_are_known_to_its_gate_while_they_serve_it(made, tmp_path):
    gate, (_, fork_server) = FakeGate(), made
    spec = replace(made[0].spec, gate=gate, build=tmp_path / "other")
    worker = Worker(fork_server, spec, Settings.quick(threads=1))
    assert gate.workers == [worker]
    assert not worker.is_trusted
    worker.discard()
    assert gate.workers == []


def test_pausing_and_resuming_signal_the_whole_session_and_the_worker_at_once(made, sent):
    worker, _ = made
    worker.pause()
    worker.resume()
    assert sent == [([worker.pid], signal.SIGSTOP), ([worker.pid, 17], signal.SIGSTOP), ([worker.pid, 17], signal.SIGCONT)]


def test_a_worker_that_is_kept_still_runs_only_while_it_is_asked(made, sent):
    moment = []
    worker = answering(made, lambda request: moment.append(sent[-1:]) or good(request))
    worker.request("call", 5.0)
    assert sent == []
    worker.keep_still()
    asked_us = worker.asked_us
    for _ in range(2):
        assert sent[-1][1] == signal.SIGSTOP
        worker.request("call", 5.0)
    assert moment == [[], *[[([worker.pid, 17], signal.SIGCONT)]] * 2]
    assert sent[-1][1] == signal.SIGSTOP
    assert worker.asked_us > asked_us > 0


def test_discarding_removes_what_it_wrote(made):
    worker, _ = made
    assert worker.private.is_dir()
    assert worker.private.stat().st_mode & 0o777 == 0o700
    worker.discard()
    assert not worker.private.exists()


def test_a_failed_start_leaves_no_socket_open(tmp_path):
    class Broken(FakeForkServer):
        def spawn(self, config, files):
            raise RuntimeError("no")

    spec = WorkerSpec(
        role="candidate",
        source="",
        class_name="",
        device="cpu",
        directory=tmp_path,
        build=tmp_path / "b",
        arena_bytes={},
        gate=FakeGate(),
    )
    with pytest.raises(RuntimeError, match="no"):
        Worker(Broken(), spec, Settings.quick())


def test_a_worker_forgets_if_it_lives_and_was_left_clean(made):
    worker = answering(made, lambda request: {**good(request), "clean": True})
    assert worker.forget()
    assert worker.channel.request["op"] == "forget"
    assert worker.arenas == {}
    worker.close()
    worker.channel = FakeChannel(lambda request: pytest.fail("it was asked, and it is gone"))
    assert not worker.forget()


@pytest.mark.parametrize(
    "answer",
    [{"clean": False}, {"clean": "yes"}, {}, ChannelClosedError()],
    ids=["traces", "no truth value", "no word", "gone"],
)
def test_a_worker_that_may_not_be_kept_says_so(made, answer):
    worker = answering(made, lambda request: answer if isinstance(answer, Exception) else good(request) | answer)
    assert not worker.forget()


def test_a_worker_that_forgot_gets_new_memory_and_a_new_module(made):
    worker = answering(made, lambda request: {**good(request), "clean": True})
    worker.request("release", 5.0)
    worker.forget()
    sent = []
    worker.channel.send_files = sent.append
    worker.adopt(replace(worker.spec, source="other", arena_bytes={"inputs": 512, "outputs": 1024}))
    assert worker.channel.request["config"]["source"] == "other"
    assert worker.channel.request["config"]["arenas"]["outputs"]["size_bytes"] == 1024
    assert sent == [[*worker.arenas["inputs"].files, *worker.arenas["outputs"].files]]
    assert worker.channel.request["files"] == 2
