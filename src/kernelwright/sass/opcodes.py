"""Tells what each opcode does beyond its register operands.

Three questions are answered here: which pipe computes the result (so how long it takes), which memory
or synchronisation state the instruction touches, and whether it may be moved at all. An opcode that
is not listed is treated as touching everything and is never moved.

Sources: CuAsmRL (arXiv 2501.08071), Huerta et al. (arXiv 2503.20481), and which opcodes ptxas 12.8
gives a write scoreboard in practice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Pipe(Enum):
    """Execution pipe of an instruction, as far as its latency is concerned."""

    ALU = "alu"
    FMA = "fma"
    IMAD = "imad"
    HALF = "half"
    SLOW = "slow"
    """FP64 and half-precision done on the matrix pipe: fixed latency, longer than the others."""
    TENSOR = "tensor"
    UNIFORM = "uniform"
    COUPLED = "coupled"
    """Crossings between the vector and uniform files with a fixed latency (R2UR, VOTEU, ...)."""
    VARIABLE = "variable"
    """Completion is counted on a scoreboard."""
    ASYNC_TENSOR = "async-tensor"
    CONTROL = "control"
    UNKNOWN = "unknown"


class Space(Enum):
    """Memory whose accesses must keep their order where one of them writes."""

    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"


ALL_SPACES = frozenset(Space)


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an opcode.

    Attributes:
        is_sync: takes part in the order of synchronisation and warp-wide operations.
        is_fence: no memory access may cross it.
        is_pinned: must stay at its address, and nothing may cross it.
        is_memory: a memory instruction in CuAsmRL's sense, which the paper's actions may choose.
        queue: the in-order queue it is issued to, if any.
        hint_mask: bits of its encoding that only advise the caches; see `hint_flips`.
    """

    pipe: Pipe
    reads: frozenset[Space] = frozenset()
    writes: frozenset[Space] = frozenset()
    is_sync: bool = False
    is_fence: bool = False
    is_pinned: bool = False
    is_memory: bool = False
    queue: str | None = None
    hint_mask: int = 0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALU = _names(
    """IADD3 IADD VIADD VIADDMNMX LOP3 LOP LEA SHF SHL SHR SEL ISETP IABS MOV PRMT IMNMX VIMNMX VIMNMX3 PLOP3
    FSETP FSEL FMNMX FMNMX3 SGXT BMSK P2R R2P LOP32I I2FP F2FP FSET PSETP HMNMX2 VHMNMX ISCADD
    F2IP I2IP VABSDIFF VABSDIFF4 FSWZADD MOV32I IADD32I ISET BFE BFI"""
)
_FMA = _names("FFMA FADD FMUL FFMA32I FADD32I FMUL32I FFMA2 FADD2 FMUL2")
_IMAD = _names("IMAD IMUL IDP IDP4A IMAD32I IMUL32I")
_HALF = _names("HFMA2 HADD2 HMUL2 HSET2 HSETP2 HFMA2_32I HADD2_32I HMUL2_32I")
_DOUBLE = _names("DADD DMUL DFMA DSETP DMNMX")
_FIXED_LATENCY_DOUBLE = frozenset({90})
"""Architectures where FP64 has a fixed latency; on 8.x it counts on scoreboards, of others nothing is known."""
_DOUBLE_TENSOR = "DMMA"
_TENSOR = _names("HMMA IMMA BMMA QMMA OMMA")
_UNIFORM = _names(
    """UIADD3 ULEA ULOP3 ULOP USHF USEL UISETP UMOV UIMAD UPLOP3 UPRMT USGXT UBMSK UVIADD UIABS UVIMNMX
    UPSETP UISCADD USHL USHR ULOP32I UMOV32I UIMNMX"""
)
_COUPLED = _names("R2UR UP2UR UR2UP ULDC CS2R")
_SCOREBOARD = _names("MUFU I2F F2I F2F FRND POPC FLO BREV FCHK")
_FREE_LOADS = _names("LDC S2R S2UR LDCU")
_GLOBAL, _SHARED, _LOCAL = (frozenset({s}) for s in (Space.GLOBAL, Space.SHARED, Space.LOCAL))
_NONE: frozenset[Space] = frozenset()
_MEMORY: dict[str, tuple[frozenset[Space], frozenset[Space]]] = {
    "LDG": (_GLOBAL, _NONE),
    "STG": (_NONE, _GLOBAL),
    "LDS": (_SHARED, _NONE),
    "LDSM": (_SHARED, _NONE),
    "STS": (_NONE, _SHARED),
    "STSM": (_NONE, _SHARED),
    "LDGSTS": (_GLOBAL, _SHARED),
    "LDL": (_LOCAL, _NONE),
    "STL": (_NONE, _LOCAL),
    "LD": (ALL_SPACES, _NONE),
    "ST": (_NONE, ALL_SPACES),
}
EVICTION_SHIFT, PREFETCH_SHIFT = 84, 68
EVICTIONS = ("EF", "", "EL", "LU", "EU", "NA")
"""Modifiers of LDG and STG by their code: evict first, normally, last, after the last use, unchanged; do not allocate."""
PREFETCHES = ("", "LTC64B", "LTC128B", "LTC256B")
"""Modifiers of LDG by their code: how much the second-level cache fetches."""
_HINTS = {"LDG": 7 << EVICTION_SHIFT | 3 << PREFETCH_SHIFT, "STG": 7 << EVICTION_SHIFT}
"""Learnt from what ptxas 12.8 and 13.0 emit for each policy of PTX's `ld.global` and `st.global`, for 8.0 to 12.0."""
_ATOMIC = _names("ATOM ATOMG ATOMS RED REDG REDAS")
_WARP_WIDE = _names("SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT")
_FENCES = _names(
    """BAR DEPBAR LDGDEPBAR ARRIVES WARPSYNC MEMBAR ERRBAR FENCE CCTL CCTLL CCTLT SYNCS NANOSLEEP
    UCGABAR_ARV UCGABAR_WAIT CGAERRBAR UTMALDG UTMASTG UTMAREDG UTMAPF UTMACMDFLUSH
    UTMACCTL UBLKCP UBLKRED UBLKPF ACQBULK B2R R2B"""
)
# Registers of a running HGMMA must stay untouched until WARPGROUP.DEPBAR; if nothing crosses any of
# these, whatever was inside or outside such a stretch stays there.
_ASYNC_TENSOR = _names("HGMMA IGMMA QGMMA BGMMA WARPGROUP WARPGROUPSET USETMAXREG")
_TRANSFER = _names(
    """BRA BRX JMP JMX JMXU BRXU CALL RET EXIT BSSY BSYNC BREAK KILL BPT YIELD NOP BMOV LEPC RPCMOV
    PREEXIT RTT CONT ENDCOLLECTIVE"""
)
BLOCK_ENDS = _names("BRA BRX JMP JMX JMXU BRXU CALL RET EXIT BSYNC BREAK KILL BPT RTT WARPSYNC")
"""Opcodes after which execution may continue somewhere else."""
NEVER_FALLS_THROUGH = _names("BRA EXIT RET JMP KILL")
"""Subset of `BLOCK_ENDS` that never continues at the next instruction unless a condition is named."""
_CLOCKS = ("SR_CLOCK", "SR_GLOBALTIMER")


@lru_cache(maxsize=4096)
def traits_of(opcode: str, modifiers: tuple[str, ...], operands: tuple[str, ...], architecture: int) -> Traits:
    """Return the traits of an instruction; an opcode that is not listed is pinned."""
    if opcode in _TRANSFER:
        return Traits(Pipe.CONTROL, ALL_SPACES, ALL_SPACES, is_sync=True, is_fence=True, is_pinned=True)
    if opcode in _MEMORY:
        reads, writes = _MEMORY[opcode]
        # A strong or volatile access orders other accesses, so it counts as writing what it touches.
        is_strong = any(m in ("STRONG", "VOLATILE", "MMIO") for m in modifiers)
        if is_strong:
            writes = writes | reads
        hints = 0 if is_strong else _HINTS.get(opcode, 0)
        return Traits(Pipe.VARIABLE, reads, writes, is_memory=True, queue="memory", hint_mask=hints)
    if opcode in _ATOMIC:
        return Traits(Pipe.VARIABLE, ALL_SPACES, ALL_SPACES, is_sync=True, queue="memory")
    if opcode in _FREE_LOADS | {"CS2R"} and any(c in operand for operand in operands for c in _CLOCKS):
        return Traits(Pipe.UNKNOWN, ALL_SPACES, ALL_SPACES, is_sync=True, is_fence=True)
    if opcode in _FREE_LOADS:
        return Traits(Pipe.VARIABLE, queue="constant" if opcode.startswith("LDC") else "special")
    if opcode in _WARP_WIDE:
        pipe = Pipe.COUPLED if opcode in ("VOTE", "VOTEU", "ELECT") else Pipe.VARIABLE
        return Traits(pipe, is_sync=True, queue="memory" if pipe is Pipe.VARIABLE else None)
    if opcode in _SCOREBOARD:
        return Traits(Pipe.VARIABLE, queue="special-function")
    if opcode in _ASYNC_TENSOR:
        return Traits(Pipe.ASYNC_TENSOR, ALL_SPACES, ALL_SPACES, is_sync=True, is_fence=True, is_pinned=True)
    if opcode in _FENCES:
        return Traits(Pipe.UNKNOWN, ALL_SPACES, ALL_SPACES, is_sync=True, is_fence=True)
    if opcode == _DOUBLE_TENSOR or (opcode in _DOUBLE and architecture not in _FIXED_LATENCY_DOUBLE):
        return Traits(Pipe.VARIABLE, queue="double")
    if opcode in _DOUBLE or (opcode == "HFMA2" and "MMA" in modifiers):
        return Traits(Pipe.SLOW)
    for names, pipe in (
        (_ALU, Pipe.ALU),
        (_FMA, Pipe.FMA),
        (_IMAD, Pipe.IMAD),
        (_HALF, Pipe.HALF),
        (_TENSOR, Pipe.TENSOR),
        (_UNIFORM, Pipe.UNIFORM),
        (_COUPLED, Pipe.COUPLED),
    ):
        if opcode in names:
            return Traits(pipe)
    return Traits(Pipe.UNKNOWN, ALL_SPACES, ALL_SPACES, is_sync=True, is_fence=True, is_pinned=True)
