"""Machines and limits that tests of rewrites share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernelwright.rewrites.fusion import groups
from kernelwright.rewrites.fusion import triton as triton_printer
from kernelwright.rewrites.templates import attention, base, convolution, products, split_product


@pytest.fixture
def float64() -> Iterator[None]:
    """Make tasks of this test run in float64, where an exact rewrite agrees to rounding of 1e-16."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where nvcc is found."""
    monkeypatch.setattr(base, "find_torch_nvcc", lambda: Path("nvcc"))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let templates take calls that are quick on a CPU."""
    for template in (split_product, products, attention):
        monkeypatch.setattr(template, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "LEAST_COLUMN", 1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors have kernels, and convolutions that cuDNN might compute faster."""
    monkeypatch.setattr(groups, "SMALLEST", 256)
    monkeypatch.setattr(triton_printer, "LEAST_READ_POINTS", 1)
    monkeypatch.setattr(convolution, "LEAST_OUTPUTS", 256)
    monkeypatch.setattr(convolution, "READS_PER_S", dict.fromkeys((True, False), 1e15))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that four programs fill."""
    monkeypatch.setattr(triton_printer, "FEW_PROGRAMS", 4)


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what Triton compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path
