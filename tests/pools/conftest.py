"""Fixtures of the tests of pools."""

from __future__ import annotations

import shutil
import tempfile

import pytest


@pytest.fixture(scope="module")
def ray_home():
    """A short path: Unix sockets lie in it. Ray keeps its token in HOME."""
    patch = pytest.MonkeyPatch()
    home = tempfile.mkdtemp(prefix="kwray", dir="/tmp")
    patch.setenv("HOME", home)
    patch.setenv("RAY_TMPDIR", home)
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_worker_niceness", "0")  # or they wait for whatever tests run beside these
    yield home
    patch.undo()
    shutil.rmtree(home, ignore_errors=True)
