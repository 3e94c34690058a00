"""Forks of the process that runs tests."""

from __future__ import annotations

import os
from collections.abc import Callable


def forked(work: Callable[[], object], status: int = 0) -> int:
    """Process id of a fork that does this work and then leaves with this status, whatever became of the work."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(status)
    return pid
