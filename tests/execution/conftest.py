"""Fixtures of the tests of pools."""

from __future__ import annotations

import shutil
import tempfile

import pytest


@pytest.fixture(scope="session")
def _ray_folder():
    """One for all Rays of a process, which reads its token once. A short path: Unix sockets lie in it."""
    folder = tempfile.mkdtemp(prefix="kwray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_home(_ray_folder):
    """Ray keeps its token in HOME."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", _ray_folder)
        patch.setenv("RAY_TMPDIR", _ray_folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # or they wait for whatever tests run beside these
        yield _ray_folder
