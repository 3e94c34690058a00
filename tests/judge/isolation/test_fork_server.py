"""The process that forks workers: its loop driven in this process, and the whole one from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernelwright.errors import SandboxError
from kernelwright.judge.isolation import fork_server, sandbox
from kernelwright.judge.isolation.fork_server import ForkLoop, ForkServer
from kernelwright.judge.isolation.sandbox import anonymous_bytes
from kernelwright.judge.worker import serving
from kernelwright.judge.worker.channel import Channel
from tests.judge.snippets import RELU, candidate

LIMITS = {"memory_limit_bytes": 1 << 40, "process_limit": 2}


class SleepingWorkers(ForkLoop):
    """Forks workers that sleep, and compiles nothing."""

    def __init__(self, channel):
        super().__init__(channel)
        self.compilers, self.hashed, self.has_hashed = [], [], threading.Event()

    def become_worker(self, config, files):
        if config.get("fails"):
            raise RuntimeError
        if config.get("leaves"):
            return
        if config.get("grows"):
            os.setsid()
            time.sleep(0.3)
            held = bytearray(64 << 20)
            held[::4096] = bytes([1]) * len(held[::4096])
        signal.pause()

    def import_compiler(self, device):
        self.compilers.append(device)

    def hash_compiler(self, name):
        self.hashed.append(name)
        if len(self.hashed) == len(fork_server.HASHES):
            self.has_hashed.set()


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield Channel(ours), Channel(theirs)
    ours.close()
    theirs.close()


@pytest.fixture
def running(ends):
    """A loop at work in a thread, and the end by which it is asked."""
    channel, theirs = ends
    loop = SleepingWorkers(theirs)
    thread = threading.Thread(target=loop.serve)
    thread.start()
    yield loop, channel
    channel.socket.shutdown(socket.SHUT_WR)
    thread.join(20)
    assert not thread.is_alive()


def spawned(channel, files=(), **config):
    channel.send({"spawn": LIMITS | config, "files": len(files)})
    channel.send_files([*files])
    return channel.receive()["pid"]


def test_workers_are_forked_ended_and_none_outlives_the_parent(ends):
    channel, theirs = ends
    loop = SleepingWorkers(theirs)
    thread = threading.Thread(target=loop.serve)
    thread.start()
    first, second = spawned(channel), spawned(channel)
    channel.send({"end": first, "grace_s": 0.0})
    assert channel.receive() == {"exit_code": -signal.SIGKILL, "cause": None}
    os.kill(second, 0)
    channel.socket.shutdown(socket.SHUT_WR)
    thread.join(20)
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_was_handed_over_is_closed_in_the_fork_server(running):
    _, channel = running
    reader, writer = os.pipe()
    spawned(channel, [writer], leaves=True)
    os.close(writer)
    assert os.read(reader, 1) == b"", "nobody holds the other end"
    os.close(reader)


def test_a_worker_that_cannot_begin_never_returns_into_the_loop(running):
    _, channel = running
    pid = spawned(channel, fails=True)
    channel.send({"end": pid, "grace_s": 20.0})
    assert channel.receive()["exit_code"] == 1


def test_a_worker_is_watched_even_when_nobody_asks(running):
    _, channel = running
    pid = spawned(channel, grows=True, memory_limit_bytes=anonymous_bytes(os.getpid()) + (32 << 20))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    channel.send({"end": pid, "grace_s": 0.0})
    assert channel.receive() == {"exit_code": -signal.SIGKILL, "cause": "memory"}


def test_the_compilers_files_are_hashed_when_nobody_asks(running):
    loop, channel = running
    channel.send({"import_modules": ["json"]})
    channel.send({"import_compiler": "cuda"})
    assert loop.has_hashed.wait(20)
    assert loop.compilers == ["cuda"]
    assert sorted(loop.hashed) == sorted(fork_server.HASHES)


@pytest.mark.parametrize("refusals", [3, fork_server.FORK_TRIES])
def test_a_fork_is_tried_again_while_processes_that_are_in_the_way_are_ended(ends, monkeypatch, refusals):
    channel, theirs = ends
    outcomes = [BlockingIOError()] * refusals

    def fork():
        if outcomes:
            raise outcomes.pop()
        return 4242

    monkeypatch.setattr(fork_server.os, "fork", fork)
    monkeypatch.setattr(fork_server.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(fork_server, "Session", lambda pid, *limits: [])
    channel.send({"spawn": LIMITS, "files": 0})
    channel.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(BlockingIOError if refusals == fork_server.FORK_TRIES else AttributeError):
        SleepingWorkers(theirs).serve()
    if refusals < fork_server.FORK_TRIES:
        assert channel.receive() == {"pid": 4242}


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_worker_gives_up_its_rights_before_it_serves_whatever_its_role(ends, monkeypatch, tmp_path, role):
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
    config = {"private": str(private), "build": str(build), "role": role, "device": "cpu", "file_limit_bytes": 9}
    connection, other = socket.socketpair()
    ForkLoop(ends[1]).become_worker(config, [connection.detach(), 77])
    other.close()
    given_up = [((private, build), "cpu", 9)]
    assert order == ["session", "bound", 0, 1, 2, (private, build), *given_up, "thread", ("serve", [77])]
    assert (private / "output.log").stat().st_mode & 0o777 == 0o600


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


def test_a_fork_server_that_does_not_go_is_killed(sleepy):
    wait = sleepy.process.wait
    sleepy.has_forked = True  # else it is killed without being asked

    def impatient(timeout=None):
        if timeout is not None:
            raise subprocess.TimeoutExpired("sleep", timeout)
        return wait()

    sleepy.process.wait = impatient
    sleepy.close()
    assert sleepy.process.returncode == -signal.SIGKILL


def test_what_has_forked_nothing_yet_is_ended_at_once(only_sleeps):
    one = ForkServer()
    one.close()
    assert one.process.returncode == -signal.SIGKILL


def test_only_named_variables_reach_the_fork_server(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    # With one queue for all streams of a GPU, work on a stream that is never joined was accepted.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    started = ForkServer()
    told = Path(f"/proc/{started.process.pid}/environ").read_text()
    started.close()
    seen = dict(entry.split("=", 1) for entry in told.split("\0") if entry)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in seen
    assert set(seen) <= {*fork_server.INHERITED_VARIABLES, *fork_server.WORKER_ENVIRONMENT}
    assert seen.items() >= fork_server.WORKER_ENVIRONMENT.items()
    assert "PATH" in seen


def test_torch_is_imported_before_the_first_fork(judge):
    assert not judge.evaluate(RELU, candidate("raise RuntimeError('no')")).accepted
    assert "libtorch_cpu" in Path(f"/proc/{judge.fork_server.process.pid}/maps").read_text()


def test_workers_have_no_modules_from_the_folder_that_the_program_was_started_in(tmp_path, monkeypatch):
    others = sys.path[1:]
    monkeypatch.chdir(tmp_path)
    for first, kept in ((str(tmp_path), False), ("", False), ("/elsewhere", True)):
        monkeypatch.setattr(sys, "path", [first, *others])
        assert fork_server.installed_path() == ([first, *others] if kept else others)
