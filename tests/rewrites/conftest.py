"""Float64 as the type of a test's tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Make tasks of this test run in float64, where an exact rewrite agrees to rounding of 1e-16."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
