"""Wraps everything that touches a compiler, a disassembler or the CUDA driver."""

from __future__ import annotations

from kernelwright.gpu.disassembler import Disassembler, disassemble, installed_disassemblers
from kernelwright.gpu.triton_compiler import ARCHITECTURES, KNOWN_ARCHITECTURES, CompiledKernel, compile_triton

__all__ = [
    "ARCHITECTURES",
    "KNOWN_ARCHITECTURES",
    "CompiledKernel",
    "Disassembler",
    "compile_triton",
    "disassemble",
    "installed_disassemblers",
]
