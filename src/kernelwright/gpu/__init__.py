"""Wraps everything that touches a compiler, a disassembler or the CUDA driver."""

from __future__ import annotations

from kernelwright.gpu.compilers import ARCHITECTURES, KNOWN_ARCHITECTURES, CompiledKernel, compile_triton
from kernelwright.gpu.disassembler import Disassembler, disassemble, installed_disassemblers

__all__ = [
    "ARCHITECTURES",
    "KNOWN_ARCHITECTURES",
    "CompiledKernel",
    "Disassembler",
    "compile_triton",
    "disassemble",
    "installed_disassemblers",
]
