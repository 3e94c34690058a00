from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _private_triton_cache(shared_by_workers):
    """Kernels are compiled anew in every test run, not taken from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(shared_by_workers / "triton-tuning"))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def row_sum():
    """A small kernel of the corpus as a target for compute capability 9.0."""
    from kernelwright.gpu.target import load_target

    return load_target("corpus:row_sum", 90)


@pytest.fixture(scope="session")
def tuned_row_sum(row_sum):
    """A legal re-schedule of `row_sum`."""
    import random

    from kernelwright import gpu as toolchain
    from kernelwright import sass

    program = sass.load(row_sum.cubin, toolchain.disassemble)
    schedule = sass.Schedule(program.kernel())
    rng = random.Random(3)
    for _ in range(40):
        move = schedule.random_move(rng)
        if move is not None:
            schedule.play(move)
    assert schedule.moved
    return schedule.cubin(program)
