"""Processes from which screening's workers are forked, with torch.compile's compiler and without."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from kernelwright.execution.fork_servers import ForkServers
from kernelwright.judge.isolation.fork_server import ForkServer


@pytest.fixture
def asked(monkeypatch):
    """Kinds of device for which servers that do nothing were asked to import the compiler."""
    asked, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start(["sleep", "1000"], **options))
    monkeypatch.setattr(ForkServer, "import_compiler", lambda self, device_type: asked.append(device_type))
    return asked


@pytest.mark.parametrize(("device_type", "at_once"), [("cuda", True), ("cpu", False)])
def test_for_a_gpu_the_compiler_is_imported_from_the_beginning(asked, device_type, at_once):
    core = max(os.sched_getaffinity(0))
    with contextlib.closing(ForkServers(device_type)) as servers:
        assert asked == [device_type] * at_once
        plain, compiling = (servers.server(compiling=compiling) for compiling in (False, True))
        assert servers.server(compiling=True) is compiling is not plain
        assert asked == [device_type]
        servers.keep_off(core)
        for server in (plain, compiling):
            assert core not in os.sched_getaffinity(server.process.pid)


def test_a_single_server_has_the_compiler_for_all(asked):
    with contextlib.closing(ForkServers("cpu", single=True)) as servers:
        assert asked == ["cpu"]
        assert servers.server(compiling=True) is servers.server(compiling=False)
