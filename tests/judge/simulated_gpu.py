"""A GPU that this machine lacks, as torch tells of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 1 << 30


@dataclass
class SimulatedGpu:
    """Sizes in GiB, which tests change, and in `asked` what torch was asked to do, in order."""

    total_gib: float = 140
    free_gib: float = 140
    reserved_gib: float = 0
    allocated_gib: float = 0
    l2_bytes: int = 50 << 20
    uuid: str = "1-2"
    capability: tuple[int, int] = (9, 0)
    asked: list[Any] = field(default_factory=list)

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Answer for torch.cuda from now on."""
        answers = {
            "get_device_properties": lambda device: SimpleNamespace(
                total_memory=int(self.total_gib * GIB), uuid=self.uuid, L2_cache_size=self.l2_bytes
            ),
            "get_device_capability": lambda device: self.capability,
            "mem_get_info": lambda device=None: (int(self.free_gib * GIB), int(self.total_gib * GIB)),
            "memory_reserved": lambda device: int(self.reserved_gib * GIB),
            "memory_allocated": lambda device: int(self.allocated_gib * GIB),
            "max_memory_reserved": lambda device: int(self.reserved_gib * GIB),
            "max_memory_allocated": lambda device: int(self.allocated_gib * GIB),
            "reset_peak_memory_stats": lambda device: None,
            "set_device": lambda device: None,
            "synchronize": lambda device: self.asked.append("synchronize"),
            "empty_cache": lambda: self.asked.append("empty_cache"),
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)


class SimulatedMemory:
    """A GPU's memory that nobody else wants; `ways` has for each entry whether it was to be had alone."""

    def __init__(self) -> None:
        self.ways: list[bool] = []
        self.alone = False

    @contextlib.contextmanager
    def __call__(self, *, alone: bool = False) -> Iterator[None]:
        self.ways.append(alone)
        self.alone = alone
        yield
