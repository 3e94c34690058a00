"""What makes the whole suite cheaper and is the same for all of it."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import ssl
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from kernelwright.execution.executor import LocalExecutor
    from kernelwright.gpu.target import Target


def pytest_configure(config: pytest.Config) -> None:
    """Give each of the processes that run tests a temporary folder of its own.

    A judge's lock files lie there. Judges for the CPU that belong to different test processes then measure at the same time,
    each on a core of its own, where one lock for the machine would make them wait for one another. The folder's name is
    short, because Unix sockets lie in it too.

    Nothing that collection makes becomes garbage, and to look for it takes a fifth of its time.
    """
    gc.disable()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        folder = tempfile.TemporaryDirectory(prefix=f"kw-{worker}-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported so far out of every later collection of garbage: torch makes each take a third of a second."""
    gc.freeze()
    gc.enable()
    # What tests make is small, and each file's is collected after it: to look for garbage more rarely costs little memory.
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    """Leave at once: the interpreter's last collection would look through all that was imported."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_tests_keep_is_not_looked_through_again() -> None:
    """Tests that collect garbage look through what their own file made, not through all that was imported since."""
    gc.collect()
    gc.freeze()


settings.register_profile("quick", max_examples=20)
"""For `make test`; `make test-all` draws hypothesis's usual hundred examples of each property."""


@pytest.fixture(scope="session")
def shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this test run alone, the same for all processes that run its tests."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session", autouse=True)
def _each_cubin_is_disassembled_once(shared_by_workers: Path) -> Iterator[None]:
    """Of the same bytes an nvdisasm prints the same, and each start costs a third of a second.

    Changed bytes are always read anew, and so are those that it refuses.
    """
    from kernelwright.gpu.disassembler import Disassembler

    folder = shared_by_workers / "listings"
    folder.mkdir(exist_ok=True)
    run = Disassembler.listing

    def listing(self: Disassembler, cubin: bytes) -> str:
        file = folder / hashlib.sha256(f"{self}\n".encode() + cubin).hexdigest()
        if file.exists():
            return zlib.decompress(file.read_bytes()).decode()
        text = run(self, cubin)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(zlib.compress(text.encode(), 1))
        own.replace(file)
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disassembler, "listing", listing)
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_commit_is_asked_for_once() -> Iterator[None]:
    """Each record of a run's environment would start git twice from a large process, some three hundred times."""
    from kernelwright.records.run_directory import commit

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELWRIGHT_COMMIT", commit() or "none")
        yield


@pytest.fixture(scope="session", autouse=True)
def _little_is_written_to_flush_caches() -> Iterator[None]:
    """Judges of these processes write 8 MiB before a timed call instead of twice the last-level cache.

    A virtual machine shows the cache of its host, of hundreds of MiB: to write twice that took nine tenths of a timed
    evaluation. No verdict depends on it. How much is written is tested with the cache itself.
    """
    from kernelwright.judge.timing import clocks as cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "last_level_cache_bytes", lambda: 4 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def _traced_calls_carry_no_stacks() -> Iterator[None]:
    """Nobody reads where an operator was called; below pytest a stack has a hundred frames, a fifth of a trace's time."""
    import torch.fx

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # torch 2.11 has no such setting
            patch.setattr(torch.fx.config, "do_not_emit_stack_traces", True)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Each client of a model's endpoint would read them anew, for 40 ms; none of these tests speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _private_triton_cache(shared_by_workers: Path) -> Iterator[None]:
    """Kernels are compiled anew in every test run, once for all processes, not taken from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(shared_by_workers / "triton"))
        yield


SECRET = "KERNELWRIGHT_TEST_SECRET"
"""A variable of the environment in which judges and their fork server start, that no worker may see."""


@pytest.fixture(scope="session")
def _one_fork_server() -> Iterator[type]:
    from kernelwright.judge.isolation.fork_server import ForkServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "hunter2")
        fork_server = ForkServer()
    owner = os.getpid()

    class OneForkServer:
        """The one that forks workers for all judges of this process; a forked test process gets one of its own."""

        def __new__(cls, off: int | None = None) -> OneForkServer | ForkServer:
            return super().__new__(cls) if os.getpid() == owner else ForkServer(off)

        def __getattr__(self, name: str) -> object:
            return getattr(fork_server, name)

        def close(self) -> None:
            """Left for the end of the session; a judge ends its own workers."""

    yield OneForkServer
    fork_server.close()


@pytest.fixture
def one_fork_server(_one_fork_server: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges that this test makes in this process share what forks their workers: each imports torch otherwise.

    For tests of what comes before and after a judge, and of what becomes of its workers. Those of judges and of how they
    start and end start their own.
    """
    monkeypatch.setattr("kernelwright.judge.judge.ForkServer", _one_fork_server)


@pytest.fixture
def set_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of GPUs that torch finds."""
    import torch

    def set_gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return set_gpus


@pytest.fixture
def set_arguments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the arguments of a script that runs in this process."""
    return lambda *words: monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])


@pytest.fixture(scope="session")
def local_executor() -> Iterator[LocalExecutor]:
    """A `LocalExecutor` of one judge for the CPU, which does not time unless the settings of work say so; leave it open.

    For tests of what hands it work: whoever makes one of its own pays for two more imports of torch. Its check is the
    brief one.
    """
    from kernelwright.execution.executor import LocalExecutor
    from kernelwright.judge import Settings

    with LocalExecutor(["cpu"], Settings.quick(threads=1, timed=False, thorough=False)) as executor:
        yield executor


@pytest.fixture(scope="session")
def row_sum() -> Target:
    """A small kernel of the corpus as a target for compute capability 9.0."""
    from kernelwright.gpu.target import load_target

    return load_target("corpus:row_sum", 90)


@pytest.fixture(scope="session")
def tuned_row_sum(row_sum: Target) -> bytes:
    """A legal re-schedule of `row_sum`."""
    from tests.sass.support import retuned

    return retuned(row_sum.cubin, seed=3)
