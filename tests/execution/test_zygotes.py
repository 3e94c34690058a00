"""Processes from which screening's workers are forked, with torch.compile's compiler and without."""

from __future__ import annotations

import contextlib
import os
import subprocess

from kernelwright.execution.zygotes import Zygotes
from kernelwright.judge.isolation.fork_server import ForkServer


def test_for_a_gpu_the_compiler_is_imported_from_the_beginning(monkeypatch):
    asked, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(["sleep", "1000"], **options))
    monkeypatch.setattr(ForkServer, "import_compiler", lambda self, device_type: asked.append(device_type))
    for device_type, at_once in (("cuda", True), ("cpu", False)):
        with contextlib.closing(Zygotes(device_type)) as both:
            assert asked == [device_type] * at_once
            assert both.compiling() is both.compiling() is not both.plain
            assert asked == [device_type]
            both.keep_off(max(os.sched_getaffinity(0)))
            for one in (both.plain, both.compiling()):
                assert max(os.sched_getaffinity(0)) not in os.sched_getaffinity(one.process.pid)
        asked.clear()
