"""One judge for all of these tests: starting one imports torch in another process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kernelwright.judge import Judge, Settings

SECRET = "KERNELWRIGHT_TEST_SECRET"
"""A variable of the judge's environment that no worker may see."""


@pytest.fixture(scope="session")
def shared_judge() -> Iterator[Judge]:
    patch = pytest.MonkeyPatch()
    patch.setenv(SECRET, "hunter2")
    assert SECRET in os.environ
    with Judge("cpu", Settings.quick(threads=1, timed=False)) as judge:
        yield judge
    patch.undo()


@pytest.fixture
def judge(shared_judge: Judge) -> Judge:
    """The shared judge, checking but not timing; tests may give it other settings."""
    shared_judge.settings = Settings.quick(threads=1, timed=False)
    return shared_judge
