"""Sessions of processes, seen and ended from outside."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest

from kernelwright.judge.isolation import sandbox
from kernelwright.judge.isolation.sandbox import Session, anonymous_bytes, session_members, signal_each
from tests.forks import forked

GONE = 2**22 + 1
"""An id that no process has."""


@pytest.fixture
def reaper():
    """This process adopts orphans, as the fork server does, and keeps none."""
    sandbox.adopt_orphans()
    yield
    sandbox.adopt_orphans(adopt=False)


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
    assert len(session_members(pid)) == 5
    assert pid in session_members(pid)
    assert Session(pid, 1 << 40, 100).end() == (-signal.SIGKILL, None)
    assert session_members(pid, zombies=True) == []


def test_a_session_that_is_dead_already_keeps_its_status(reaper):
    pid = forked(lambda: None, status=7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert Session(pid, 1 << 40, 100).end().exit_code == 7


def test_a_worker_on_its_way_out_is_waited_for(reaper):
    """It lives when it is asked about first; killed then, it would not show how it left."""
    pid = forked(lambda: (os.setsid(), time.sleep(0.1)), status=7)
    assert Session(pid, 1 << 40, 100).end(grace_s=60.0).exit_code == 7


def test_a_worker_that_does_not_leave_in_time_is_killed(reaper):
    pid, start_s = session(children=1), time.monotonic()
    assert Session(pid, 1 << 40, 100).end(grace_s=0.1).exit_code == -signal.SIGKILL
    assert time.monotonic() - start_s > 0.1
    assert session_members(pid, zombies=True) == []


def test_a_worker_that_was_just_forked_is_ended_as_well():
    """It has no session of its own yet, in which it would be looked for."""
    pid = forked(lambda: select.select([], [], [], 20), status=7)  # would leave by itself then, and say so
    assert Session(pid, 1 << 40, 100).end().exit_code == -signal.SIGKILL


def test_a_signal_reaches_every_member_and_those_that_have_ended_are_no_error():
    pid = session(children=1)
    signal_each([GONE, *session_members(pid)], signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert session_members(GONE) == []
    assert anonymous_bytes(GONE) == 0
    assert anonymous_bytes(os.getpid()) > 1 << 20


@pytest.mark.parametrize(
    ("share", "most", "cause"),
    [(2.0, 3, None), (0.9, 3, "memory"), (2.0, 2, "processes")],
    ids=["within its limits", "memory of all together", "one process too many"],
)
def test_a_session_beyond_a_limit_is_ended(reaper, share, most, cause):
    pid = session(children=2)
    watched = Session(pid, int(share * sum(map(anonymous_bytes, session_members(pid)))), most)
    for _ in range(10):  # the whole session is looked at every tenth time
        assert watched.cause is None
        watched.watch()
    assert watched.cause == cause
    assert cause or len(session_members(pid)) == 3
    watched.watch()
    assert watched.end() == (-signal.SIGKILL, cause)
    assert session_members(pid, zombies=True) == []


def test_memory_of_the_worker_itself_is_looked_at_every_time(reaper):
    watched = Session(session(), 1000, 3)
    watched.watch()
    assert watched.end().cause == "memory"
