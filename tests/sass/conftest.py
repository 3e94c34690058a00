from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _private_triton_cache(tmp_path_factory):
    """Kernels are compiled anew in every test run, not taken from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield
    patch.undo()
