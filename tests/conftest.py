"""What makes the whole suite cheaper and is the same for all of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported so far out of every later collection of garbage: torch makes each take a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _one_zygote() -> Iterator[type]:
    from kernelwright.evaluation.zygote import Zygote

    zygote = Zygote()
    owner = os.getpid()

    class OneZygote:
        """The one that forks workers for all judges of this process; a forked test process gets one of its own."""

        def __new__(cls) -> OneZygote | Zygote:
            return super().__new__(cls) if os.getpid() == owner else Zygote()

        def __getattr__(self, name: str) -> object:
            return getattr(zygote, name)

        def close(self) -> None:
            """Left for the end of the session; a judge ends its own workers."""

    yield OneZygote
    zygote.close()


@pytest.fixture
def one_zygote(_one_zygote: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges that this test makes in this process share what forks their workers: each imports torch otherwise.

    For tests of what comes before and after a judge. Those of judges and their processes start their own.
    """
    monkeypatch.setattr("kernelwright.evaluation.judge.Zygote", _one_zygote)


@pytest.fixture(scope="session")
def judge_pool() -> Iterator[object]:
    """A `JudgePool` of one judge for the CPU, which does not time unless a job's settings say so; leave it open.

    For tests of what hands it work: whoever makes a pool of its own pays for two more imports of torch.
    """
    from kernelwright.evaluation import JudgePool, Settings

    with JudgePool(["cpu"], Settings.quick(threads=1, timed=False)) as pool:
        yield pool
