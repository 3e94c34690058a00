"""Processes that judge and screen: what runs in them, how they start, and that none outlives a run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernelwright.errors import DeviceError, TaskError
from kernelwright.execution import processes
from kernelwright.execution.processes import ChildProcess, judge_main, judged, see_one_gpu
from kernelwright.execution.work import Baselines, Evaluate
from kernelwright.judge import Settings
from kernelwright.records import Candidate, Evaluation, Task, Verdict
from tests.judge.snippets import RELU, candidate

SETTINGS = Settings.quick(threads=1, timed=False)
LIMIT_S = 60


def work(number=0, **options):
    return Evaluate(Task(id=str(number), source="x"), Candidate(source=str(number)), **options)


class FakeJudge:
    core = None

    def __init__(self, device="cpu", settings=None, fork_server=None):
        self.device = torch.device(device)
        self.closed, self.released, self.seen = False, 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def close(self):
        self.closed = True

    def import_compiler(self):
        """For all candidates to come."""

    def release_idle(self):
        self.released += 1

    def evaluate(self, task, candidate, settings=None, alone=None, alongside=()):
        self.seen.append((settings, alone, alongside))
        if task.id == "broken":
            raise TaskError("Wanted another task.")
        return Evaluation(task=task.id, task_sha256="a", candidate_sha256="b", verdict=Verdict.ACCEPTED)


def test_an_evaluation_or_an_error_comes_back():
    judge, baseline = FakeJudge(), Candidate(source="baseline")
    (found,) = judged(judge, "cuda:3", work(4), False)
    assert (found.task, found.device) == ("4", "cuda:3")
    error = judged(judge, "cuda:3", work("broken"), False)
    assert (type(error), str(error), error.__traceback__) == (TaskError, "Wanted another task.", None)
    judged(judge, "cuda:3", work(settings=SETTINGS, alongside=(baseline,)), True)
    assert judge.seen == [(None, False, ()), (None, False, ()), (SETTINGS, True, (baseline,))]


@pytest.fixture
def rotations(monkeypatch):
    """What a rotation that measures nothing was told."""
    told = []

    def rotate(judge, task, baselines, settings=None, alone=None):
        told.append((settings, alone))
        return [judge.evaluate(task, one) for one in baselines]

    monkeypatch.setattr("kernelwright.judge.timing.rotation.rotate", rotate)
    return told


def test_baselines_come_back_together(rotations):
    assert len(judged(FakeJudge(), "cpu", Baselines(RELU, (candidate(), candidate()), SETTINGS), True)) == 2
    assert rotations == [(SETTINGS, True)]


@pytest.fixture
def memory(monkeypatch):
    """Devices whose peak was reset, on a GPU that is not there."""
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 << 30)
    return reset


def test_a_record_says_how_much_of_a_gpu_the_judge_itself_took(memory):
    judge = FakeJudge("cuda:0")
    (found,) = judged(judge, "cuda:3", work(), False)
    assert found.checks == {"judge_bytes": 5 << 30}
    assert memory == [judge.device]


@pytest.fixture
def judging(monkeypatch):
    """Runs `judge_main` in this process on messages, by judges that may fail to be made; returns answers and judges."""
    monkeypatch.setattr(processes.sandbox, "die_with_parent", lambda: None)
    monkeypatch.setattr(processes, "ForkServer", FakeJudge)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(messages, device="cpu", error=None, ready=False):
        waiting, answers, judges = [*messages], [], []

        def make(device, settings, fork_server):
            if error is not None:
                raise error
            judges.append(FakeJudge(device))
            return judges[-1]

        def receive():
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("kernelwright.judge.judge.Judge", make)
        handler = signal.getsignal(signal.SIGINT)
        try:
            judge_main(SimpleNamespace(recv=receive, send=answers.append), device, SETTINGS.model_dump_json(), ready)
        finally:
            signal.signal(signal.SIGINT, handler)
        return answers, judges, waiting

    return run


@pytest.mark.parametrize(("count", "ready"), [(0, False), (0, True), (2, False), (2, True)])
def test_the_process_judges_until_the_other_side_hangs_up(judging, count, ready):
    messages = [None, *(message for number in range(count) for message in ((work(number), False), None))]
    answers, judges, _ = judging(messages, ready=ready)
    assert [found.task for (found,) in answers] == [str(number) for number in range(count)]
    made = bool(count or ready)
    assert [(judge.closed, judge.released) for judge in judges] == [(True, count + ready)] * made


def test_a_judge_that_cannot_be_made_is_the_works_error_and_the_processs_end(judging):
    answers, _, waiting = judging([(work(1), False), (work(2), False)], error=DeviceError("Wanted a GPU."), ready=True)
    assert [(type(answer), str(answer)) for answer in answers] == [(DeviceError, "Wanted a GPU.")]
    assert len(waiting) == 1, "another process must try"


def test_a_process_for_one_gpu_sees_no_other(judging, memory):
    _, (judge,), _ = judging([(work(), False)], "cuda:1")
    assert judge.device == torch.device("cuda:0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("device", "visible", "wanted", "local"),
    [
        ("cuda:1", None, "1", "cuda:0"),
        ("cuda:1", "4,6", "6", "cuda:0"),
        ("cpu", "4", "4", "cpu"),
        ("cpu", None, None, "cpu"),
    ],
)
def test_one_gpu_of_several_is_seen(monkeypatch, device, visible, wanted, local):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert see_one_gpu(device) == local
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wanted


# --- real processes ---------------------------------------------------------------------------------------------------


def preparation(connection):
    """What multiprocessing would have a child of the child do, and whether the user's script is its main program."""
    connection.send(sorted({"init_main_from_path", "init_main_from_name"} & spawn.get_preparation_data("x").keys()))
    connection.recv()


@pytest.fixture
def script(monkeypatch):
    """A main program that another process would run again."""
    made = ModuleType("__main__")
    made.__file__ = "script.py"
    monkeypatch.setitem(sys.modules, "__main__", made)
    return made


def test_a_process_is_started_without_the_users_script_and_is_killed_where_it_does_not_go(script):
    process = ChildProcess(preparation)
    assert process.receive() == []
    assert sys.modules["__main__"] is script
    process.stop()
    with pytest.raises(EOFError):
        process.receive()
    process.release_idle()
    assert process.end() == -signal.SIGKILL


@pytest.mark.exhaustive
def test_a_real_process_judges_and_dies():
    process = ChildProcess(judge_main, "cpu", SETTINGS.model_dump_json())
    try:
        process.send((Evaluate(RELU, candidate()), False))
        (found,) = process.receive()
        assert found.accepted, found.detail
        process.send((Evaluate(Task(id="t", source="def ("), candidate()), False))
        assert isinstance(process.receive(), TaskError)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            process.receive()
    finally:
        assert process.end() == -signal.SIGKILL


def ignores_interrupts(status: Path) -> bool:
    (mask,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("main", ["judge_main", "screen_main"])
def test_a_process_does_not_outlive_a_killed_run(main):
    code = (
        "import signal\n"
        "from kernelwright.judge import Settings\n"
        f"from kernelwright.execution.processes import ChildProcess, {main}\n"
        "if __name__ == '__main__':\n"
        f"    process = ChildProcess({main}, 'cpu', Settings.quick().model_dump_json())\n"
        "    print(process.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        parent = subprocess.Popen([sys.executable, file.name], stdout=subprocess.PIPE, text=True)
        pid = int(parent.stdout.readline())
        status = Path(f"/proc/{pid}/status")
        deadline_s = time.monotonic() + LIMIT_S
        while not ignores_interrupts(status):  # the last step of its setting up
            assert time.monotonic() < deadline_s, "it has not begun"
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline_s = time.monotonic() + LIMIT_S
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.05)
