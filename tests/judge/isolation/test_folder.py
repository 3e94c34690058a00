"""Temporary folders of judges, also of those that were killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright.errors import SandboxError
from kernelwright.judge import Judge, Settings
from kernelwright.judge.isolation import workers as folder_module
from kernelwright.judge.isolation.sandbox import session_members
from kernelwright.judge.isolation.workers import JudgeFolder, remove_left_folders, require_room
from tests.judge.snippets import RELU, candidate

pytestmark = pytest.mark.usefixtures("temporary")


def test_a_folder_of_a_living_judge_stays_and_goes_with_all_that_is_in_it(tmp_path):
    folder = JudgeFolder()
    (folder.path / "a").mkdir()
    remove_left_folders()
    assert (folder.path / "a").is_dir()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_that_judges_left_are_removed(tmp_path):
    left = tmp_path / "kernelwright-judge-left"
    (left / "deep" / "er").mkdir(parents=True)
    left.chmod(0)
    others = [tmp_path / "kernelwright-other", tmp_path / "kernelwright-judge-file", tmp_path / "kernelwright-judge-link"]
    others[0].mkdir()
    others[1].write_text("x")
    others[2].symlink_to(others[0])
    remove_left_folders()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "kernelwright-judge-theirs").mkdir()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: os.getuid() + 1)
    remove_left_folders()
    assert [path.name for path in tmp_path.iterdir()] == ["kernelwright-judge-theirs"]


def test_one_that_was_taken_for_left_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    lock, taken = folder_module._locked, []

    def locked(path):
        if not taken:
            taken.append(path)
            path.rmdir()
        return lock(path)

    monkeypatch.setattr(folder_module, "_locked", locked)
    folder = JudgeFolder()
    assert folder.path.is_dir()
    assert folder.path not in taken
    folder.remove()


def test_a_place_where_nothing_can_be_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_locked", lambda path: None)
    with pytest.raises(SandboxError, match="Set TMPDIR"):
        JudgeFolder()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_a_full_disk_is_not_the_candidates(tmp_path, monkeypatch):
    require_room()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(SandboxError, match="MB are left, so its failure says nothing"):
        require_room()


KILLED = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from kernelwright.judge import Judge, Settings
from tests.judge.snippets import RELU, candidate
judge = Judge("cpu", Settings.quick(threads=1, timed=False))
print(judge.fork_server.process.pid, flush=True)
judge.evaluate(RELU, candidate("pass", init=sys.argv[2]))
"""
LEAVES = """os.makedirs("a/b"); os.mkfifo("a/pipe"); os.chmod("a", 0)
if os.fork() == 0:
    while True: time.sleep(1)
os.fork()
while True: time.sleep(1)
"""


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


@pytest.mark.exhaustive
def test_a_judge_that_is_killed_leaves_no_process_and_the_next_one_removes_its_folder(tmp_path):
    judge = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), LEAVES], stdout=subprocess.PIPE, text=True)
    fork_server = int(judge.stdout.readline())
    workers: list[int] = []
    while not any(len(session_members(pid)) == 3 for pid in workers):
        workers = children_of(fork_server)
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    while Path(f"/proc/{fork_server}").exists() or any(session_members(pid) for pid in workers):
        pass
    assert list(tmp_path.glob("kernelwright-judge-*"))
    with Judge("cpu", Settings.quick(threads=1, timed=False)) as later:
        assert later.evaluate(RELU, candidate()).accepted
    assert not list(tmp_path.glob("kernelwright-judge-*"))
