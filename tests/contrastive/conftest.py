from __future__ import annotations

import functools

import pytest


@pytest.fixture(scope="session", autouse=True)
def _identities_once():
    """Every equipment reads the packaged patterns anew; what each one's snippet is like does not change."""
    from kernelwright.contrastive.hacks import database

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "identity", functools.cache(database.identity))
        yield
