"""Counts where the seconds of a piece of work go, and tells the time of day as records have it."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import defaultdict
from collections.abc import Iterator


def utc_now() -> str:
    """This moment in UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def counted(spent_s: defaultdict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a block to those of its phase, whether it fails or not."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        spent_s[phase] += time.perf_counter() - start_s
