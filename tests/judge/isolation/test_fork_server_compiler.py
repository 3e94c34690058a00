"""The compiler that a fork server imports for its workers."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kernelwright.judge.isolation import fork_server
from tests.quick import exhaustive_but

LOOP = fork_server.ForkLoop(None)


class _BeganAnewError(Exception):
    pass


@pytest.mark.parametrize(
    ("opened", "begins_anew"), exhaustive_but([([0, 0], False), ([0, 2], True), ([3, 3], False)], ([0, 2], True))
)
def test_a_fork_server_that_opened_the_gpu_by_importing_the_compiler_begins_anew_without_it(
    monkeypatch, opened, begins_anew
):
    imported = []

    def begin_anew(program, arguments):
        assert (program, arguments) == (sys.executable, sys.orig_argv)
        raise _BeganAnewError

    monkeypatch.setattr(fork_server, "open_gpu_files", lambda: opened.pop(0))
    monkeypatch.setattr(fork_server.importlib, "import_module", imported.append)
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    monkeypatch.setattr(fork_server.os, "execv", begin_anew)
    monkeypatch.setattr(fork_server.os, "environ", {})
    if begins_anew:
        with pytest.raises(_BeganAnewError):
            LOOP.import_compiler("cuda")
        LOOP.import_compiler("cuda")
    else:
        LOOP.import_compiler("cuda")
    assert imported == [*fork_server.COMPILER]


def test_a_library_that_starts_a_thread_is_left_to_the_workers_and_the_others_are_imported_again(monkeypatch):
    loop, ended = fork_server.ForkLoop(None), threading.Event()
    threads = {"threaded": threading.Thread(target=ended.wait)}
    monkeypatch.setattr(
        fork_server.importlib, "import_module", lambda name: threads[name].start() if name in threads else None
    )
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    monkeypatch.setattr(fork_server.os, "environ", {})
    monkeypatch.setattr(fork_server.os, "execv", lambda program, arguments: None)
    loop.import_modules(["plain"])
    loop.import_modules(["threaded"])
    ended.set()
    assert [json.loads(value) for value in os.environ.values()] == [["plain"], ["threaded"]]


def test_a_class_that_a_library_loads_when_asked_is_loaded_and_the_library_noted_anew(monkeypatch):
    loop, noted = fork_server.ForkLoop(None), []
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: monkeypatch.setitem(sys.modules, "lazy._parts", lazy) or name
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: noted.append(True))
    loop.import_modules(["lazy.Part", "lazy.there.is.no.such"])
    assert "lazy._parts" in sys.modules
    loop.import_modules(["lazy.Part"])
    assert noted == [True], "only where something was loaded"


def test_on_a_processor_torch_probes_its_instructions_once_for_all_workers(monkeypatch):
    imported, probed = [], []

    def import_module(name):
        imported.append(name)
        return SimpleNamespace(pick_vec_isa=lambda: probed.append(name))

    monkeypatch.setattr(fork_server.importlib, "import_module", import_module)
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    LOOP.import_compiler("cpu")
    assert imported == [*fork_server.COMPILER, "torch._inductor.cpu_vec_isa"]
    assert probed == ["torch._inductor.cpu_vec_isa"]


def test_the_compiler_hashes_its_files_before_workers_are_forked(monkeypatch):
    hashed = []
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", SimpleNamespace(torch_key=lambda: hashed.append("torch")))
    for name in fork_server.HASHES:  # the second one is not there
        LOOP.hash_compiler(name)
    assert hashed == ["torch"]
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", None)
    LOOP.hash_compiler("torch_key")  # nothing is imported for it


def test_every_module_and_function_named_for_the_compiler_is_there():
    for name in fork_server.COMPILER:
        assert importlib.util.find_spec(name) is not None, name
    source = Path(importlib.util.find_spec("torch._inductor.codecache").origin).read_text(encoding="utf-8")
    assert all(f"\ndef {name}(" in source for name in fork_server.HASHES)


def test_open_files_of_the_gpu_are_counted(monkeypatch):
    read = os.readlink
    before = fork_server.open_gpu_files()
    with open(os.devnull, "rb") as file:
        own = f"/proc/self/fd/{file.fileno()}"
        monkeypatch.setattr(fork_server.os, "readlink", lambda path: "/dev/nvidia0" if path == own else read(path))
        assert fork_server.open_gpu_files() == before + 1
