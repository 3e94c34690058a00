"""Reads, re-schedules and checks NVIDIA machine code. Pure Python: no torch, no GPU.

from kernelwright import gpu, sass

program = sass.load(cubin, gpu.disassemble)
schedule = sass.Schedule(program.kernel())
schedule.play(next(schedule.legal_moves()))
assert not sass.check(cubin, schedule.cubin(program), gpu.disassemble)
"""

from __future__ import annotations

from kernelwright.errors import CubinError, ListingError, MoveError
from kernelwright.sass.check import CheckReport, Violation, check, check_report
from kernelwright.sass.instruction import ControlWord, Instruction
from kernelwright.sass.neighbours import ANY_MOVE, Neighbourhood
from kernelwright.sass.program import Block, Disassembler, Kernel, Program, load
from kernelwright.sass.schedule import (
    MOVE_KINDS,
    AnyMove,
    ClusterMove,
    HintEdit,
    Move,
    ReuseEdit,
    Schedule,
    ScoreboardEdit,
    StallEdit,
    YieldEdit,
    kind_of,
    move_from_json,
    move_to_json,
)

__all__ = [
    "ANY_MOVE",
    "MOVE_KINDS",
    "AnyMove",
    "Block",
    "CheckReport",
    "ClusterMove",
    "ControlWord",
    "CubinError",
    "Disassembler",
    "HintEdit",
    "Instruction",
    "Kernel",
    "ListingError",
    "Move",
    "MoveError",
    "Neighbourhood",
    "Program",
    "ReuseEdit",
    "Schedule",
    "ScoreboardEdit",
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
