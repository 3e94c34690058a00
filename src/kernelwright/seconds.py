"""Counts where the seconds of a piece of work go."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


@contextlib.contextmanager
def counted(spent_s: defaultdict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a block to those of its phase, whether it fails or not."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        spent_s[phase] += time.perf_counter() - start_s
