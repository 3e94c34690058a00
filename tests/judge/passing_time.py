"""A judge's time where it waits for a candidate that hangs: its limits are long, and yet nobody waits for them."""

from __future__ import annotations

import contextlib
import glob
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.judge.isolation.process import process_clock
from kernelwright.judge.worker.serving import STACK_LOG


class PassingTime:
    """The module `time` for what waits for answers.

    It is as ever until a candidate, or what it started, has run the statement `hangs`. From then on `step_s` pass at each
    look, if `has_come` says so: limits are reached by what hangs, and by nothing else however slow the machine is. What has
    `waits` behind `hangs` goes on when `until_s` have passed.
    """

    def __init__(self, step_s: float, has_come: Callable[[Path], bool], until_s: float) -> None:
        self._step_s, self._has_come, self._until_s = step_s, has_come, until_s
        self._name = f"hangs-{secrets.token_hex(6)}"
        self._mark: Path | None = None
        self.passed_s = 0.0
        self.hangs = f'import os; open("{self._name}", "w").write(str(os.getpid()))'
        self.waits = f'while os.path.exists("{self._name}"): pass'

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic`."""
        if self._mark is None:
            # Path.glob would fail where other evaluations remove their folders meanwhile.
            marks = glob.glob(f"{tempfile.gettempdir()}/kernelwright-judge-*/candidate-*/{self._name}")
            self._mark = Path(marks[0]) if marks else None
        if self._mark is not None and self._mark.exists() and self._has_come(self._mark):
            self.passed_s += self._step_s
            if self.passed_s >= self._until_s:
                self._mark.unlink()
        return time.monotonic() + self.passed_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextlib.contextmanager
def passing_time(
    step_s: float = 2.0, has_come: Callable[[Path], bool] = Path.exists, until_s: float = math.inf
) -> Iterator[PassingTime]:
    """Time that passes for the judges of this process."""
    with pytest.MonkeyPatch.context() as patch:
        passing = PassingTime(step_s, has_come, until_s)
        patch.setattr("kernelwright.judge.isolation.process.time", passing)
        yield passing


def tells_where() -> Callable[[Path], bool]:
    """Whether the worker that hangs has said once more where it is."""
    size = 0

    def has_come(mark: Path) -> bool:
        nonlocal size
        before, size = size, (mark.parent / STACK_LOG).stat().st_size
        return size > before or not before

    return has_come


def uses_the_processor(seconds: float) -> Callable[[Path], bool]:
    """Whether the process that made the mark has used the processor for so much longer."""
    spent_s = 0.0

    def has_come(mark: Path) -> bool:
        nonlocal spent_s
        try:
            now_s = time.clock_gettime(process_clock(int(mark.read_text())))
        except (OSError, ValueError):  # it has ended, or has not written who it is yet
            return False
        is_more = now_s >= spent_s + seconds
        spent_s = now_s if is_more else spent_s
        return is_more

    return has_come
