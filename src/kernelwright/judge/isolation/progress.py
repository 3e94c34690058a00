"""Tells a worker whose compiler is at work from one that hangs: only the first has minutes for its answer.

A compiler is at work when processes of the toolchain use processor time, or when the worker does so inside a compiler that
is a library. The worker's own account of where it is can be forged. A candidate that does so only waits longer itself.
"""

from __future__ import annotations

import os
import re

from kernelwright.errors import InternalError
from kernelwright.judge.isolation.fork_server import session_members

_COMPILERS = re.compile(
    r"(?:[\w-]+-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|ld|lld|as)(?:[-.][\w.]+)?|cc1|cc1plus|collect2|lto1|lto-wrapper|gold"
    r"|nvcc|cicc|ptxas|ptxas-\w+|fatbinary|cudafe\+\+|nvlink|ninja|hipcc|rustc"
)
"""Names of processes as the kernel knows them."""
_LIBRARIES = re.compile(
    r"/torch/(_dynamo/(convert_frame|symbolic_convert)|_inductor/(graph|scheduler|lowering)|jit/(_script|frontend)|cuda/_utils)\.py"
    r"|/torch/_inductor/codegen/|/triton/(compiler|backends)/"
    r"|/numba/core/|/cupy/cuda/compiler\.py|/cutlass/base_dsl/|/tilelang/|/tvm/"
)
"""Python files that are on the stack while a compiler works in the worker's own process, and not while its result runs.

Inductor's own are among them: an account ends after a hundred frames, and its recursion over a large graph is deeper.
"""
_FRAME = re.compile(r'^  File "([^"\n]{1,4096})", line (\d{1,9}|\?\?\?) in (.{1,200})$', re.MULTILINE)
_DUMP = "(most recent call first)"
_DUMP_BYTES_MAX = 1 << 16
_BUSY_SHARE = 0.05
"""Share of one core that a compiler at work uses at least. Our choice."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StuckError(InternalError):
    """A worker neither answers nor compiles, or its kernels go on after it was stopped."""


class CompilerWatch:
    """Looks at a worker from time to time while an answer is due, until it has been without progress for too long.

    Args:
        pid: The worker, whose session is all that it started.
        asked: Pipe that asks the worker where it is.
        stack: File to which it writes that.
        limit_s: Longest time without progress, of the worker's running time.
    """

    def __init__(self, pid: int, asked: int, stack: int, limit_s: float) -> None:
        self._pid = pid
        self._asked = asked
        self._stack = stack
        self._limit_s = limit_s
        self._looked_s = 0.0
        self._spent_s: dict[int, float] = {}
        self.compiled_s = 0.0
        """Latest moment at which a compiler was at work."""
        self._where = ""
        self._compiler = ""
        self._read_from = os.fstat(stack).st_size

    def is_stuck(self, ran_s: float) -> bool:
        """Whether the worker, which has run for so long, has made no progress within the limit."""
        if ran_s - self._looked_s >= self._limit_s / 16:
            if self._has_worked(ran_s - self._looked_s):
                self.compiled_s = ran_s
            self._looked_s = ran_s
            os.write(self._asked, b"?")
        return ran_s - self.compiled_s >= self._limit_s

    def detail(self) -> str:
        """Reason, in words, for saying that there was no progress."""
        if self._compiler:
            return f"its compiler ({self._compiler}) was started and used no processor time"
        return f"no compiler was at work{self._where}"

    def _has_worked(self, passed_s: float) -> bool:
        least_s = _BUSY_SHARE * passed_s
        before, self._spent_s, self._compiler = self._spent_s, {}, ""
        worked_s = 0.0
        for pid in session_members(self._pid):
            name, spent_s = _name_and_time(pid)
            is_compiler = pid != self._pid and _COMPILERS.fullmatch(name) is not None
            if is_compiler or pid == self._pid:
                self._spent_s[pid] = spent_s
            if is_compiler:
                self._compiler = name
                worked_s += spent_s - before.get(pid, 0.0)
        own_s = self._spent_s.get(self._pid, 0.0) - before.get(self._pid, 0.0)
        return worked_s >= least_s or (self._in_library() and own_s >= least_s)

    def _in_library(self) -> bool:
        """Whether a thread of the worker's latest account has a compiler above the candidate's own code."""
        size = os.fstat(self._stack).st_size
        start = max(self._read_from, size - _DUMP_BYTES_MAX)
        self._read_from = size
        text = os.pread(self._stack, size - start, start).decode("utf-8", "replace")
        self._where = "" if text else "; no Python code ran in it"
        for thread in text.split(_DUMP)[1:]:
            for path, line, function in _FRAME.findall(thread):
                if _LIBRARIES.search(path):
                    return True
                if path.endswith("/candidate.py"):
                    self._where = f"; it was last seen in candidate.py, line {line}, in {function}"
                    break
        return False


def _name_and_time(pid: int) -> tuple[str, float]:
    """A process's name, and processor time of it and of its children that have ended, seconds."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return "", 0.0
    return before.partition("(")[2], sum(map(int, after.split()[11:15])) / _TICKS_PER_S
