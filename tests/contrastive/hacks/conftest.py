"""The packaged patterns, read once."""

from __future__ import annotations

import pytest

from kernelwright.contrastive.hacks import (
    HackDatabase,
    Pattern,
    Retriever,
)
from kernelwright.contrastive.hacks.database import packaged_patterns


@pytest.fixture(scope="session")
def patterns() -> tuple[Pattern, ...]:
    return packaged_patterns()


@pytest.fixture(scope="session")
def retriever(patterns) -> Retriever:
    return Retriever(HackDatabase(patterns))
