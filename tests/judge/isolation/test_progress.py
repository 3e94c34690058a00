"""Candidates that never return: what is told from a compiler at work, and that no other evaluation waits for them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation import process
from kernelwright.judge.isolation.gate import DeviceGate
from kernelwright.judge.isolation.process import CompilerWatch
from kernelwright.judge.worker import serving
from kernelwright.records import Candidate, Reason
from tests.judge.isolation.forked import in_child
from tests.judge.passing_time import passing_time, tells_where, uses_the_processor
from tests.judge.snippets import ANY_WAIT, RELU, candidate
from tests.quick import exhaustive_but

BRIEF = Settings.quick(threads=1, timed=False, thorough=False, run_limit_s=60.0)
HURRIED = BRIEF.model_copy(update={"stall_limit_s": 1.0})
RIGHT = "return torch.relu(self.linear(x))"

# --- one look after another -----------------------------------------------------------------------


class Looks:
    """A worker, and what is found at each look: processes as {pid: (name, seconds)}, and what the worker wrote."""

    def __init__(self, monkeypatch, tmp_path):
        self.found, self.file = {}, tmp_path / "stack"
        self.file.write_text("from before: /triton/compiler/")
        asked, asks = os.pipe()
        os.set_blocking(asked, False)
        os.set_blocking(asks, False)
        self.asked = asked
        monkeypatch.setattr(process, "session_members", lambda pid: list(self.found))
        monkeypatch.setattr(process, "_name_and_time", lambda pid: self.found[pid])
        self.watch = CompilerWatch(7, asks, os.open(self.file, os.O_RDONLY), limit_s=16.0)

    def look(self, at_s, found, wrote=""):
        self.found = found
        with self.file.open("a") as file:
            file.write(wrote)
        return self.watch.is_stuck(at_s)


@pytest.fixture
def looks(monkeypatch, tmp_path):
    return Looks(monkeypatch, tmp_path)


def frames(*places):
    lines = "".join(f'  File "{path}", line {line} in {function}\n' for path, line, function in places)
    return f"Current thread 0x1 (most recent call first):\n{lines}"


PYTHON = ("python3", 0.0)


def test_one_that_only_computes_is_stuck_after_its_limit_and_where_it_was_is_told(looks):
    own = frames(("/tmp/x/candidate.py", 12, "forward"), ("/p/torch/_dynamo/convert_frame.py", 3, "_compile"))
    assert not looks.look(2.0, {7: ("python3", 2.0)})
    assert os.read(looks.asked, 9) == b"?"
    assert not looks.look(15.9, {7: ("python3", 15.0)}, own)
    assert looks.look(16.1, {7: ("python3", 16.0)})
    assert looks.watch.detail() == "no compiler was at work; it was last seen in candidate.py, line 12, in forward"


@pytest.mark.parametrize(
    "name", ["nvcc", "cicc", "ptxas", "cc1plus", "g++", "x86_64-linux-gnu-gcc-12", "clang++", "ninja", "ld"]
)
def test_a_compiler_that_uses_processor_time_is_progress(looks, name):
    assert not looks.look(10.0, {7: PYTHON, 8: (name, 1.0)})
    assert not looks.look(20.0, {7: PYTHON, 8: (name, 2.0)})
    assert looks.watch.compiled_s == 20.0
    assert not looks.look(35.0, {7: PYTHON, 8: (name, 2.0)})
    assert looks.look(36.0, {7: PYTHON, 8: (name, 2.0)})
    assert looks.watch.detail() == f"its compiler ({name}) was started and used no processor time"


@pytest.mark.parametrize("name", ["sh", "python3", "sleep", "nvccx", "notgcc"])
def test_other_processes_are_no_progress(looks, name):
    assert not looks.look(10.0, {7: PYTHON, 8: (name, 5.0)})
    assert looks.look(16.0, {7: PYTHON, 8: (name, 16.0)})


@pytest.mark.parametrize(
    "path",
    [
        "/p/torch/_dynamo/convert_frame.py",
        "/p/torch/_inductor/scheduler.py",
        "/p/torch/_inductor/codegen/simd.py",
        "/p/triton/compiler/compiler.py",
        "/p/triton/backends/nvidia/compiler.py",
    ],
)
def test_a_compiler_in_the_workers_own_process_is_progress_while_it_computes(looks, path):
    above = frames(("/p/contextlib.py", 3, "inner"), (path, 100, "compile"), ("/tmp/x/candidate.py", 12, "forward"))
    assert not looks.look(10.0, {7: ("python3", 1.0)}, above)
    assert looks.watch.compiled_s == 10.0
    assert not looks.look(25.0, {7: ("python3", 1.1)}, above)
    assert looks.look(26.0, {7: ("python3", 1.1)}, above), "it waits for something"


@pytest.mark.parametrize("at", [0, 1])
def test_a_compiler_in_any_of_the_workers_threads_is_progress(looks, at):
    threads = [frames(("/p/threading.py", 3, "wait"), ("/tmp/x/candidate.py", 12, "forward"))]
    threads.insert(at, frames(("/p/torch/_dynamo/convert_frame.py", 100, "compile"), ("/tmp/x/candidate.py", 9, "capture")))
    assert not looks.look(10.0, {7: ("python3", 9.0)}, "".join(threads))
    assert not looks.look(25.0, {7: ("python3", 9.1)})
    assert looks.look(26.0, {7: ("python3", 9.1)})


def test_results_of_a_compiler_that_run_in_two_threads_are_no_progress(looks):
    running = frames(("/p/torch/_inductor/runtime/triton_heuristics.py", 3, "run"), ("/tmp/x/candidate.py", 12, "forward"))
    assert not looks.look(10.0, {7: ("python3", 9.0)}, running + running)
    assert looks.look(16.0, {7: ("python3", 15.0)}, running + running)
    assert looks.watch.detail() == "no compiler was at work; it was last seen in candidate.py, line 12, in forward"


def test_what_was_written_before_is_not_read_again(looks):
    above = frames(("/p/triton/compiler/compiler.py", 100, "compile"))
    assert not looks.look(10.0, {7: ("python3", 9.0)}, above)
    assert not looks.look(20.0, {7: ("python3", 19.0)})
    assert looks.look(26.0, {7: ("python3", 25.0)})


# --- candidates -----------------------------------------------------------------------------------

COMPILE = """
import ctypes, subprocess
def native(code):
    with open("loop.c", "w") as file:
        file.write(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "loop.so", "loop.c"], check=True)
    return ctypes.PyDLL(os.path.abspath("loop.so"))
"""
FAKE = """
import subprocess
def program(name, body):
    os.makedirs("bin", exist_ok=True)
    path = os.path.abspath("bin/" + name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o700), "w") as file:
        file.write("#!" + sys.executable + chr(10) + body)
    os.environ["PATH"] = os.path.abspath("bin") + ":" + os.environ["PATH"]
"""
BUSY = "import time\nwhile time.process_time() < 1.5: pass\n"
"""Longer than a stall may be."""
NEVER = {
    "a loop in Python": (candidate("HANGS\nwhile True: pass"), Reason.RUN_TIMEOUT, "candidate.py, line"),
    "a loop in the constructor": (candidate(init="HANGS\nwhile True: pass"), Reason.BUILD_TIMEOUT, "in __init__"),
    "a loop in C that keeps the interpreter's lock": (
        candidate("f = native('int f(void) { for (;;); }').f\nHANGS\nf()", top=COMPILE),
        Reason.RUN_TIMEOUT,
        "no Python code ran in it",
    ),
    "a child that never ends": (
        candidate("HANGS\npid = os.fork()\nif not pid:\n    while True: pass\nos.waitpid(pid, 0)\n" + RIGHT),
        Reason.RUN_TIMEOUT,
        "candidate.py, line",
    ),
    "a compiler that hangs": (
        candidate(init="program('nvcc', 'HANGS\\nimport time\\ntime.sleep(1000)')\nsubprocess.run(['nvcc'])", top=FAKE),
        Reason.BUILD_TIMEOUT,
        "its compiler (nvcc) was started and used no processor time",
    ),
    "one that answers no signal": (
        candidate(
            "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
            "HANGS\nwhile True: pass"
        ),
        Reason.RUN_TIMEOUT,
        "no compiler was at work",
    ),
}


@pytest.mark.parametrize("what", exhaustive_but(NEVER, "a child that never ends", "a compiler that hangs"))
def test_one_that_never_returns_is_rejected_with_what_it_did(judge, what):
    proposed, reason, words = NEVER[what]
    has_come = tells_where() if words in ("candidate.py, line", "in __init__") else Path.exists
    with passing_time(BRIEF.stall_limit_s / 16, has_come) as passing:
        proposed = Candidate(source=proposed.source.replace("HANGS", passing.hangs))
        found = judge.evaluate(RELU, proposed, settings=BRIEF)
    assert found.reason is reason, (found.reason, found.detail)
    assert f"no progress within {BRIEF.stall_limit_s:g} s" in found.detail
    assert words in found.detail


@pytest.mark.parametrize("name", exhaustive_but(["cicc", "cc1plus"], "cicc"))
def test_a_compiler_at_work_may_take_longer_than_that(judge, name):
    settings = BRIEF.model_copy(update={"stall_limit_s": 8.0})
    with passing_time(0.5, uses_the_processor(0.05), until_s=9.0) as passing:
        init = f"program({name!r}, {passing.hangs + chr(10) + passing.waits!r})\nsubprocess.run([{name!r}], check=True)"
        found = judge.evaluate(RELU, candidate(init=init, top=FAKE), settings=settings)
    assert found.accepted, (found.reason, found.detail)
    assert passing.passed_s > settings.stall_limit_s


IN_A_THREAD = """
import threading
CODE = compile("def g(n):\\n  return 0 if n <= 0 else g(n - 1)\\ng(30)", "/p/triton/compiler/compiler.py", "exec")
def compiles():
    until = time.process_time() + 3
    while time.process_time() < until:
        exec(CODE, {})
"""


def asked_often(private, seconds):
    """Let a thread compute for a while, and ask all the time where it is."""
    names = {"time": time}
    exec(IN_A_THREAD.replace("time.process_time() + 3", f"time.process_time() + {seconds}"), names)
    os.mkfifo(private / serving.ASKED)
    asks = os.open(private / serving.ASKED, os.O_RDWR)
    serving.say_where_when_asked(private)
    worker = threading.Thread(target=names["compiles"])
    worker.start()
    while worker.is_alive():
        os.write(asks, b"?")
        time.sleep(0.0005)


@pytest.mark.parametrize("seconds", exhaustive_but((1, 3), 1))
def test_a_process_says_where_its_threads_are_and_goes_on(seconds, tmp_path):
    assert in_child(lambda: asked_often(tmp_path, seconds)) is None
    accounts = (tmp_path / serving.STACK_LOG).read_text()
    assert accounts.count("most recent call first") > 100
    assert re.search(r'File "/p/triton/compiler/compiler.py", line \d+ in g\n', accounts)


@pytest.mark.exhaustive
def test_a_compiler_in_a_thread_of_the_candidates_is_looked_at_without_harm(judge):
    # Asked about from a signal's handler, which read frames that were being made, it crashed in two runs of four.
    init = "worker = threading.Thread(target=compiles)\nworker.start()\nworker.join()"
    found = judge.evaluate(RELU, candidate(init=init, top=IN_A_THREAD), settings=HURRIED)
    assert found.accepted, (found.reason, found.detail)


@pytest.mark.exhaustive
def test_a_compiler_at_work_has_its_limit_too(judge):
    init = f"program('nvcc', {BUSY.replace('1.5', '1e9')!r})\nsubprocess.run(['nvcc'], check=True)"
    settings = HURRIED.model_copy(update={"build_limit_s": 2.0})
    found = judge.evaluate(RELU, candidate(init=init, top=FAKE), settings=settings)
    assert found.reason is Reason.BUILD_TIMEOUT
    assert found.detail.startswith("no answer to `build` within 2 s")


LATER = """self.calls += 1
if self.calls == 2:
    program('nvcc', {busy!r})
    subprocess.run(['nvcc'], check=True)
return torch.relu(self.linear(x))"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("busy", "accepted"), [("1", True), ("1e9", False)])
def test_a_later_call_may_compile_as_long_as_the_first_one(judge, busy, accepted):
    body = LATER.format(busy=BUSY.replace("1.5", busy))
    settings = HURRIED.model_copy(update={"run_limit_s": 0.5, "build_limit_s": 5.0})
    found = judge.evaluate(RELU, candidate(body, init="self.calls = 0", top=FAKE), settings=settings)
    assert found.accepted == accepted, (found.reason, found.detail)
    assert accepted or (found.reason is Reason.RUN_TIMEOUT and "no answer to `call` within 0.5 s" in found.detail)


# --- beside others --------------------------------------------------------------------------------


def test_another_one_is_timed_while_one_never_returns(judge, one_fork_server, monkeypatch):
    events, endless, began = [], SimpleNamespace(worker=None), threading.Event()
    aside = DeviceGate.stand_aside

    def stand_aside(self, file, worker):
        if not worker.is_trusted and "while True" in worker.spec.source:
            endless.worker = worker
            began.set()
        waited_s = aside(self, file, worker)
        if waited_s and worker is endless.worker:
            events.append("stopped")
        return waited_s

    monkeypatch.setattr(DeviceGate, "stand_aside", stand_aside)
    with Judge("cpu", HURRIED.model_copy(update={"stall_limit_s": 3600.0, "build_limit_s": 3600.0})) as other:

        def evaluate():
            # Endless where it is built: two judges of one process may not draw inputs at once.
            found = other.evaluate(RELU, Candidate(source=candidate().source + "while True: pass\n"))
            events.append(found.reason)

        evaluating = threading.Thread(target=evaluate)
        evaluating.start()
        assert began.wait(60.0)
        found = judge.evaluate(RELU, candidate(), settings=Settings.quick(threads=1, thorough=False, **ANY_WAIT))
        assert found.speedup is not None, (found.reason, found.detail)
        events.append("timed")
        os.kill(endless.worker.pid, signal.SIGKILL)
        evaluating.join()
    assert events.index("stopped") < events.index("timed") < events.index(Reason.CRASHED)
