"""One judge for all of these tests, on what forks the workers of other tests' judges too: starting one imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kernelwright.judge import Judge, Settings
from tests.conftest import SECRET


@pytest.fixture(scope="session")
def shared_judge(_one_fork_server: type) -> Iterator[Judge]:
    patch = pytest.MonkeyPatch()
    patch.setenv(SECRET, "hunter2")
    assert SECRET in os.environ
    with Judge("cpu", Settings.quick(threads=1, timed=False), fork_server=_one_fork_server()) as judge:
        yield judge
    patch.undo()


@pytest.fixture
def judge(shared_judge: Judge) -> Judge:
    """The shared judge, checking but not timing; tests may give it other settings."""
    shared_judge.settings = Settings.quick(threads=1, timed=False)
    return shared_judge
