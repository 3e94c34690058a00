"""The process that forks workers: its parts driven in this process, and the whole one from outside."""

from __future__ import annotations

import array
import gc
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright.errors import SandboxError
from kernelwright.judge.isolation import fork_server, sandbox
from kernelwright.judge.isolation.fork_server import Ending, ForkServer, _Watched
from kernelwright.judge.worker import serving
from kernelwright.judge.worker.channel import Channel
from tests.judge.snippets import RELU, candidate

LIMITS = {"memory_limit_bytes": 1000, "process_limit": 2}


@pytest.fixture
def reaper():
    """This process adopts orphans, as the fork server does, and keeps none."""
    sandbox.adopt_orphans()
    yield
    sandbox._libc.prctl(sandbox.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def session(children=0, orphans=0):
    """A process with a session of its own and some descendants in it, all asleep; returns its id."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(children):
            if os.fork() == 0:
                signal.pause()
        for _ in range(orphans):
            middle = os.fork()
            if middle == 0:
                if os.fork() == 0:
                    signal.pause()
                os._exit(0)
            os.waitpid(middle, 0)
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return pid


def test_members_of_a_session_are_found_and_ended_whole(reaper):
    pid = session(children=2, orphans=2)
    assert len(fork_server.session_members(pid)) == 5
    assert pid in fork_server.session_members(pid)
    answer = fork_server._end(_Watched(pid, LIMITS))
    assert answer == {"exit_code": -signal.SIGKILL, "cause": None}
    assert fork_server.session_members(pid, zombies=True) == []


def test_a_session_that_is_dead_already_keeps_its_status(reaper):
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ending = Ending(**fork_server._end(_Watched(pid, LIMITS)))
    assert ending.exit_code == 7


def test_a_worker_on_its_way_out_is_waited_for(monkeypatch):
    """It lives when it is asked about first; killed then, it would not show how it left."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        theirs.send(b"x")
        theirs.recv(1)
        os._exit(7)
    ours.recv(1)
    waits = []

    def let_go(seconds):
        if not waits:
            ours.send(b"x")
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        waits.append(seconds)

    monkeypatch.setattr(fork_server.time, "sleep", let_go)
    ending = Ending(**fork_server._end(_Watched(pid, LIMITS), grace_s=60.0))
    assert ending.exit_code == 7
    assert len(waits) == 2
    ours.close()
    theirs.close()


def test_a_worker_that_does_not_leave_in_time_is_killed(reaper, monkeypatch):
    pid = session(children=1)
    now_s = [0.0]

    def sleep(seconds):
        assert now_s[0] < 0.25, "it waits on"
        now_s.append(now_s.pop() + 0.1)

    monkeypatch.setattr(fork_server.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(fork_server.time, "sleep", sleep)
    try:
        ending = Ending(**fork_server._end(_Watched(pid, LIMITS), grace_s=0.25))
    finally:
        fork_server._kill_session(pid)
    assert ending.exit_code == -signal.SIGKILL
    assert fork_server.session_members(pid, zombies=True) == []
    assert now_s[0] > 0.25


def test_a_worker_that_was_just_forked_is_ended_as_well():
    """It has no session of its own yet, in which it would be looked for."""
    pid = os.fork()
    if pid == 0:
        select.select([], [], [], 20)  # would leave by itself then, and say so
        os._exit(7)
    ending = fork_server._end(_Watched(pid, LIMITS))
    assert ending["exit_code"] == -signal.SIGKILL


def test_a_signal_reaches_every_member():
    pid = session(children=1)
    fork_server.signal_each(fork_server.session_members(pid), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_processes_that_end_meanwhile_are_no_error(monkeypatch):
    gone = 2**22 + 1
    monkeypatch.setattr(fork_server, "session_members", lambda pid, zombies=False: [gone])
    fork_server.signal_each([gone], signal.SIGKILL)
    fork_server._kill_session(1)
    assert fork_server._anonymous_bytes(gone) == 0
    assert fork_server._anonymous_bytes(os.getpid()) > 1 << 20


def test_a_process_that_vanishes_while_it_is_looked_at_is_no_member(monkeypatch):
    entries = [SimpleNamespace(name="self"), SimpleNamespace(name=str(2**22 + 1))]
    monkeypatch.setattr(fork_server.os, "scandir", lambda path: entries)
    assert fork_server.session_members(1) == []


def test_an_orphan_that_is_not_ours_to_reap_is_left_to_its_parent(monkeypatch):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    answers = [[2**22 + 1], []]
    monkeypatch.setattr(fork_server, "_kill_session", lambda session: None)
    monkeypatch.setattr(fork_server, "session_members", lambda session, *, zombies: answers.pop(0))
    assert fork_server._end(_Watched(pid, LIMITS)) == {"exit_code": 0, "cause": None}
    assert answers == []


def test_an_orphan_that_never_goes_away_does_not_hold_the_judge_up(monkeypatch):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(fork_server, "_kill_session", lambda session: None)
    monkeypatch.setattr(fork_server, "session_members", lambda session, *, zombies: [2**22 + 1])
    assert fork_server._end(_Watched(pid, LIMITS))["exit_code"] == 0


# --- the watch ------------------------------------------------------------------------------------


@pytest.fixture
def killed(monkeypatch):
    ended = []
    monkeypatch.setattr(fork_server, "_kill_session", ended.append)
    return ended


def watch(monkeypatch, members, bytes_each, ticks=10):
    monkeypatch.setattr(fork_server, "session_members", lambda pid: members)
    monkeypatch.setattr(fork_server, "_anonymous_bytes", lambda pid: bytes_each)
    one = _Watched(5, LIMITS)
    for _ in range(ticks):
        fork_server._watch(one)
    return one.cause


def test_within_its_limits_a_worker_is_left_alone(monkeypatch, killed):
    assert watch(monkeypatch, [5, 6], 500) is None
    assert killed == []


def test_too_much_memory_of_all_members_together_ends_the_session_once(monkeypatch, killed):
    assert watch(monkeypatch, [5, 6], 501, ticks=40) == "memory"
    assert killed == [5]


def test_too_many_members_end_the_session(monkeypatch, killed):
    assert watch(monkeypatch, [5, 6, 7], 0) == "processes"
    assert killed == [5]


def test_memory_of_the_worker_itself_is_looked_at_every_time(monkeypatch, killed):
    assert watch(monkeypatch, [5], 1001, ticks=1) == "memory"


# --- forking --------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield Channel(ours), Channel(theirs)
    ours.close()
    theirs.close()


def hand_over(channel, files):
    channel.socket.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])


def test_the_parent_side_of_a_fork_closes_what_was_handed_over(ends, monkeypatch):
    ours, theirs = ends
    hand_over(ours, [0, 0])
    monkeypatch.setattr(fork_server.os, "fork", lambda: 4242)
    before = len(os.listdir("/proc/self/fd"))
    assert fork_server._fork(theirs, {"files": 2, "spawn": {}}, {}) == 4242
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("refusals", [3, fork_server._FORK_TRIES])
def test_a_fork_is_tried_again_while_processes_that_are_in_the_way_are_ended(ends, monkeypatch, refusals):
    _, theirs = ends
    outcomes, looks = [BlockingIOError()] * refusals + [4242], []

    def fork():
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(fork_server.os, "fork", fork)
    monkeypatch.setattr(fork_server, "_watch", looks.append)
    monkeypatch.setattr(fork_server.time, "sleep", lambda seconds: None)
    if refusals == fork_server._FORK_TRIES:
        with pytest.raises(BlockingIOError):
            fork_server._fork(theirs, {"files": 0, "spawn": {}}, {7: "other"})
    else:
        assert fork_server._fork(theirs, {"files": 0, "spawn": {}}, {7: "other"}) == 4242
        assert looks == ["other"] * refusals


class Left(Exception):
    pass


@pytest.mark.parametrize(("fails", "status"), [(False, 0), (True, 1)])
def test_the_child_side_of_a_fork_never_returns(ends, monkeypatch, fails, status):
    ours, theirs = ends
    hand_over(ours, [0])
    became = []

    def become(channel, config, files):
        became.append((channel, config, len(files)))
        os.close(files[0])
        if fails:
            raise RuntimeError

    def leave(code):
        raise Left(code)

    monkeypatch.setattr(fork_server.os, "fork", lambda: 0)
    monkeypatch.setattr(fork_server.os, "_exit", leave)
    monkeypatch.setattr(fork_server, "_become_worker", become)
    with pytest.raises(Left, match=str(status)):
        fork_server._fork(theirs, {"files": 1, "spawn": {"x": 1}}, {})
    assert became == [(theirs, {"x": 1}, 1)]


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_worker_gives_up_its_rights_before_it_serves_whatever_its_role(ends, monkeypatch, tmp_path, role):
    _, theirs = ends
    order = []
    monkeypatch.setattr(fork_server.os, "setsid", lambda: order.append("session"))
    monkeypatch.setattr(sandbox, "die_with_parent", lambda: order.append("bound"))
    monkeypatch.setattr(fork_server.os, "dup2", lambda source, target: order.append(target))
    monkeypatch.setattr(fork_server.signal, "signal", lambda number, action: None)
    monkeypatch.setattr(serving, "prepare_directories", lambda private, build: order.append((private, build)))
    monkeypatch.setattr(sandbox, "restrict", lambda writable, device, limit: order.append((writable, device, limit)))
    monkeypatch.setattr(serving, "say_where_when_asked", lambda private: order.append("thread"))
    monkeypatch.setattr(serving, "serve", lambda connection, config, files: order.append(("serve", files)))
    private, build = tmp_path, tmp_path / "build"
    config = {
        "private": str(private),
        "build": str(build),
        "role": role,
        "device": "cpu",
        "file_limit_bytes": 9,
    }
    connection, other = socket.socketpair()
    fork_server._become_worker(theirs, config, [connection.detach(), 77])
    other.close()
    given_up = [((private, build), "cpu", 9)]
    assert order == ["session", "bound", 0, 1, 2, (private, build), *given_up, "thread", ("serve", [77])]
    assert (private / "output.log").stat().st_mode & 0o777 == 0o600


def test_the_main_loop_spawns_watches_ends_and_cleans_up(monkeypatch):
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    pids, watched, ended, compilers, hashed = [11, 12], [], [], [], []

    def fork(channel, message, watched):
        return pids.pop(0)

    monkeypatch.setattr(fork_server, "_WATCH_S", 0.0)
    monkeypatch.setattr(fork_server, "_fork", fork)
    monkeypatch.setattr(fork_server, "_watch", lambda one: watched.append(one.pid))
    monkeypatch.setattr(
        fork_server, "_end", lambda one, grace_s=0.0: ended.append(one.pid) or {"exit_code": 0, "cause": None}
    )
    monkeypatch.setattr(sandbox, "adopt_orphans", lambda: None)
    monkeypatch.setattr(fork_server, "_import_compiler", compilers.append)
    monkeypatch.setattr(fork_server, "_hash", hashed.append)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    channel.send({"import_compiler": "cuda"})
    channel.send({"spawn": LIMITS, "files": 0})
    channel.send({"spawn": LIMITS, "files": 0})
    channel.send({"end": 11, "grace_s": 0.0})
    ours.shutdown(socket.SHUT_WR)
    fork_server.main(theirs.detach())
    assert [channel.receive() for _ in range(3)] == [{"pid": 11}, {"pid": 12}, {"exit_code": 0, "cause": None}]
    assert compilers == ["cuda"]
    assert hashed == []  # nobody waits for it
    assert set(watched) == {11, 12}
    assert ended == [11, 12]
    ours.close()


def test_the_main_loop_hashes_the_compilers_files_when_nobody_asks(monkeypatch):
    ours, theirs = socket.socketpair()
    hashed = []

    def hash_one(name):
        hashed.append(name)
        if len(hashed) == len(fork_server._HASHES):
            ours.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(fork_server, "_hash", hash_one)
    monkeypatch.setattr(fork_server, "_import_compiler", lambda device_type: None)
    monkeypatch.setattr(sandbox, "adopt_orphans", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    Channel(ours).send({"import_compiler": "cuda"})
    fork_server.main(theirs.detach())
    assert sorted(hashed) == sorted(fork_server._HASHES)
    ours.close()


def test_the_main_loop_looks_even_when_nobody_asks(monkeypatch):
    ours, theirs = socket.socketpair()
    looks = []

    def look(one):
        looks.append(one.pid)
        if len(looks) == 3:
            ours.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(fork_server, "_WATCH_S", 0.0)
    monkeypatch.setattr(fork_server, "_fork", lambda channel, message, watched: 11)
    monkeypatch.setattr(fork_server, "_watch", look)
    monkeypatch.setattr(fork_server, "_end", lambda one, grace_s=0.0: {})
    monkeypatch.setattr(sandbox, "adopt_orphans", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    Channel(ours).send({"spawn": LIMITS, "files": 0})
    fork_server.main(theirs.detach())
    assert looks == [11, 11, 11]
    ours.close()


# --- from outside ---------------------------------------------------------------------------------


@pytest.fixture
def only_sleeps(monkeypatch):
    """Processes of fork servers only sleep."""
    start = subprocess.Popen
    monkeypatch.setattr(fork_server.subprocess, "Popen", lambda command, **options: start(["sleep", "1000"], **options))


@pytest.fixture
def sleepy(only_sleeps, monkeypatch):
    """A fork server whose process only sleeps."""
    made = ForkServer()
    monkeypatch.undo()
    yield made
    made.process.kill()
    made.process.wait()


def test_a_fork_server_that_is_gone_is_a_sandbox_error(sleepy):
    sleepy.process.kill()
    sleepy.process.wait()
    with pytest.raises(SandboxError, match="exit status -9"):
        sleepy.spawn({}, [0])
    with pytest.raises(SandboxError, match="Try again"):
        sleepy.end(1)


def test_a_fork_server_that_does_not_go_is_killed(sleepy, monkeypatch):
    wait = sleepy.process.wait
    sleepy._has_forked = True  # else it is killed without being asked

    def impatient(timeout=None):
        if timeout is not None:
            raise subprocess.TimeoutExpired("sleep", timeout)
        return wait()

    monkeypatch.setattr(sleepy.process, "wait", impatient)
    sleepy.close()
    assert sleepy.process.returncode == -signal.SIGKILL


def test_what_has_forked_nothing_yet_is_ended_at_once(only_sleeps):
    one = ForkServer()
    one.close()
    assert one.process.returncode == -signal.SIGKILL


def test_only_named_variables_reach_the_fork_server(monkeypatch):
    seen = {}
    start = subprocess.Popen

    def remember(command, **options):
        seen.update(options["env"])
        return start(["true"], **options)

    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    # With one queue for all streams of a GPU, work on a stream that is never joined was accepted.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(fork_server.subprocess, "Popen", remember)
    ForkServer().close()
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in seen
    assert set(seen) <= {*fork_server.INHERITED_VARIABLES, *fork_server.WORKER_ENVIRONMENT}
    assert seen.items() >= fork_server.WORKER_ENVIRONMENT.items()
    assert "PATH" in seen


def test_torch_is_imported_before_the_first_fork(judge):
    assert not judge.evaluate(RELU, candidate("raise RuntimeError('no')")).accepted
    assert "libtorch_cpu" in Path(f"/proc/{judge._fork_server.process.pid}/maps").read_text()


def test_workers_have_no_modules_from_the_folder_that_the_program_was_started_in(tmp_path, monkeypatch):
    others = sys.path[1:]
    monkeypatch.chdir(tmp_path)
    for first, kept in ((str(tmp_path), False), ("", False), ("/elsewhere", True)):
        monkeypatch.setattr(sys, "path", [first, *others])
        assert fork_server._installed_path() == ([first, *others] if kept else others)
