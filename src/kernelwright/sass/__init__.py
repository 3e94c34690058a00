"""Reading, re-scheduling and checking NVIDIA machine code. Pure Python: no torch, no GPU.

from kernelwright import sass, toolchain

program = sass.load(cubin, toolchain.disassemble)
schedule = sass.Schedule(program.kernel())
schedule.play(next(schedule.legal_moves()))
assert not sass.check(cubin, schedule.cubin(program), toolchain.disassemble)
"""

from __future__ import annotations

from kernelwright.sass.check import CheckReport, Violation, check, check_report
from kernelwright.sass.control import ControlWord
from kernelwright.sass.errors import CubinError, ListingError, MoveError
from kernelwright.sass.instruction import Instruction
from kernelwright.sass.program import Block, Disassembler, Kernel, Program, load
from kernelwright.sass.schedule import Move, Schedule

__all__ = [
    "Block",
    "CheckReport",
    "ControlWord",
    "CubinError",
    "Disassembler",
    "Instruction",
    "Kernel",
    "ListingError",
    "Move",
    "MoveError",
    "Program",
    "Schedule",
    "Violation",
    "check",
    "check_report",
    "load",
]
