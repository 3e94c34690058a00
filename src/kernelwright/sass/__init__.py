"""Reading, re-scheduling and checking NVIDIA machine code. Pure Python: no torch, no GPU.

from kernelwright import sass, toolchain

program = sass.load(cubin, toolchain.disassemble)
schedule = sass.Schedule(program.kernel())
schedule.play(next(schedule.legal_moves()))
assert not sass.check(cubin, schedule.cubin(program), toolchain.disassemble)
"""

from __future__ import annotations

import importlib
from typing import Any

from kernelwright.sass.check import CheckReport, Violation, check, check_report
from kernelwright.sass.control import ControlWord
from kernelwright.sass.errors import CubinError, ListingError, MoveError
from kernelwright.sass.instruction import Instruction
from kernelwright.sass.moves import (
    MOVE_KINDS,
    AnyMove,
    ClusterMove,
    Move,
    ReuseEdit,
    StallEdit,
    YieldEdit,
    kind_of,
    move_from_json,
    move_to_json,
)
from kernelwright.sass.neighbours import Neighbourhood
from kernelwright.sass.program import Block, Disassembler, Kernel, Program, load
from kernelwright.sass.schedule import Schedule

__all__ = [
    "MOVE_KINDS",
    "AnyMove",
    "Block",
    "CheckReport",
    "ClusterMove",
    "ControlWord",
    "CubinError",
    "Disassembler",
    "Instruction",
    "Kernel",
    "ListingError",
    "Move",
    "MoveError",
    "Neighbourhood",
    "Program",
    "ReuseEdit",
    "Schedule",
    "StallEdit",
    "Violation",
    "YieldEdit",
    "check",
    "check_report",
    "kind_of",
    "load",
    "move_from_json",
    "move_to_json",
]


def __getattr__(name: str) -> Any:
    """Give `kernelwright.sass.jit`, the decorator for Triton functions; see `docs/deploy.md`.

    It lives in a layer above and is found by name when it is asked for, so that this package needs no torch.
    """
    if name == "jit":
        return importlib.import_module("kernelwright.tuning.triton_jit").jit
    raise AttributeError(f"module 'kernelwright.sass' has no attribute {name!r}")
