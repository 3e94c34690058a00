from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _private_triton_cache(shared_by_workers):
    """Kernels are compiled anew in every test run, not taken from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(shared_by_workers / "triton-sass"))
    yield
    patch.undo()
