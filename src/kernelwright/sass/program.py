"""Turns a cubin into kernels, basic blocks and control flow, and writes a new schedule back."""

from __future__ import annotations

import heapq
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernelwright.errors import CubinError, ListingError
from kernelwright.sass.elf import CodeSection, CubinImage, read_cubin
from kernelwright.sass.instruction import INSTRUCTION_BYTES, Instruction, ListedKernel, parse_instruction, parse_listing
from kernelwright.sass.opcodes import BLOCK_ENDS, NEVER_FALLS_THROUGH

Disassembler = Callable[[bytes], str]
"""Turns a cubin into the listing of `nvdisasm -c -hex -plr -lrm narrow`."""

_OPCODE_MASK = 0xFFF
_NOP = 0x918
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: instruction indices [start, stop) of its kernel, and the blocks that may follow."""

    index: int
    start: int
    stop: int
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One kernel's code; two are equal only if they are the same object.

    Attributes:
        architecture: compute capability times ten.
        code: where its bytes lie, and the side tables that name its instructions.
        instructions: in address order; index i lies at address 16 * i. Padding at the end is left out.
        blocks: basic blocks in address order, covering every instruction once.
        fixed: indices of instructions that must stay at their address: they transfer control, name a code address,
        stand in a side table, or are not understood.
        assembled: the kernel as the assembler wrote it, where scoreboards were assigned anew.
    """

    name: str
    architecture: int
    code: CodeSection
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]
    fixed: frozenset[int]
    assembled: Kernel | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A cubin with its kernels disassembled."""

    image: CubinImage
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str | None = None) -> Kernel:
        """Return the kernel called `name`, or the only kernel.

        Raises:
            CubinError: there is no such kernel, or the choice is not clear.
        """
        names = [k.name for k in self.kernels]
        if name is None and len(self.kernels) == 1:
            return self.kernels[0]
        if name not in names:
            wanted = "exactly one kernel" if name is None else f"kernel {name!r}"
            raise CubinError(f"wanted {wanted}, found {names}; name one of them")
        return self.kernels[names.index(name)]

    def with_words(self, words: Mapping[str, Sequence[int]]) -> bytes:
        """Return the cubin with the given kernels' instruction words; all other bytes stay."""
        data = bytearray(self.image.data)
        for kernel in self.kernels:
            if kernel.name not in words:
                continue
            new = words[kernel.name]
            if len(new) != len(kernel.instructions):
                raise CubinError(f"wanted {len(kernel.instructions)} words for {kernel.name}, found {len(new)}")
            packed = b"".join(word.to_bytes(INSTRUCTION_BYTES, "little") for word in new)
            start = kernel.code.section.offset_bytes
            data[start : start + len(packed)] = packed
        return bytes(data)


def load(cubin: bytes, disassemble: Disassembler) -> Program:
    """Parse and disassemble a cubin, for example with `kernelwright.gpu.disassemble`.

    Raises:
        CubinError: the bytes are not a readable cubin.
        ListingError: the disassembly lacks live ranges.
        KernelwrightError: whatever `disassemble` raises.
    """
    image = read_cubin(cubin)
    return assemble_program(image, disassemble(cubin))


def assemble_program(image: CubinImage, listing: str, without: Collection[str] = ()) -> Program:
    """Join a parsed container with its listing, `without` some kernels; see `load`."""
    listed = parse_listing(listing, without)
    return Program(image, tuple(_kernel(image, code, listed) for code in image.code if code.kernel not in without))


def _kernel(image: CubinImage, code: CodeSection, listed: dict[str, ListedKernel]) -> Kernel:
    found = listed.get(code.kernel)
    words = [low | high << 64 for low, high in struct.iter_unpack("<QQ", image.code_bytes(code))]
    if found is None or not 0 < len(found.instructions) <= len(words):
        count = 0 if found is None else len(found.instructions)
        raise CubinError(
            f"wanted {len(words)} instructions of {code.kernel} in the disassembly, found {count}; the cubin may be damaged"
        )
    # The padding after the last branch is not printed.
    if any(word & _OPCODE_MASK != _NOP for word in words[len(found.instructions) :]):
        raise CubinError(f"wanted all of {code.kernel} in the disassembly, found it to end early")
    for position, (instruction, word) in enumerate(zip(found.instructions, words, strict=False)):
        if instruction.address != position * INSTRUCTION_BYTES or instruction.word != word:
            raise CubinError(f"wanted the bytes of {code.kernel} at {instruction.address:#x}, found others")
        if not instruction.has_marks:
            raise ListingError(
                f"wanted register live ranges for {code.kernel}, found none: the disassembler is of another "
                "generation than the assembler (use the one shipped beside it), or cannot follow the code"
            )
    instructions = tuple(parse_instruction(i, image.architecture) for i in found.instructions)
    fixed = frozenset(
        index
        for index, instruction in enumerate(instructions)
        if instruction.traits.is_pinned
        or instruction.address in code.listed_offsets
        or code.has_relocations
        or not instruction.is_certain
        or "`(" in instruction.text
        or "32@" in instruction.text
        or instruction.control.stall == 0
        or not instruction.control.is_encodable()
        or instruction.predicate in ("!PT", "!UPT")
    )
    return Kernel(code.kernel, image.architecture, code, instructions, _blocks(instructions, found.labels), fixed)


def _blocks(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[Block, ...]:
    """Split code into linked basic blocks.

    A jump of unknown target may reach every block, and every block may reach code that nothing is seen to lead to.
    """
    count = len(instructions)
    starts = {0}
    starts.update(address // INSTRUCTION_BYTES for address in labels.values())
    starts.update(i + 1 for i, instruction in enumerate(instructions) if instruction.opcode in BLOCK_ENDS)
    edges = sorted(s for s in starts if s < count)
    stops = [*edges[1:], count]
    block_at = {start: index for index, start in enumerate(edges)}
    everywhere = tuple(range(len(edges)))
    return_sites = tuple(block_at[stop] for stop in stops if stop < count and instructions[stop - 1].opcode == "CALL")
    blocks = []
    for index, (start, stop) in enumerate(zip(edges, stops, strict=True)):
        last = instructions[stop - 1]
        target = _TARGET.search(last.text) if last.opcode in BLOCK_ENDS else None
        following: set[int] = set()
        # The fall-through of a call is kept: the callee may be a tail of library code not seen here.
        if _may_fall_through(last) and stop < count:
            following.add(block_at[stop])
        if target is not None and target[1] in labels:
            following.add(block_at[labels[target[1]] // INSTRUCTION_BYTES])
        elif last.opcode == "RET":
            following.update(return_sites or everywhere)
        elif last.opcode in BLOCK_ENDS - {"EXIT", "BSYNC", "KILL", "BPT", "WARPSYNC"}:
            following.update(everywhere)
        blocks.append(Block(index, start, stop, tuple(sorted(following))))
    lost = _unreached(blocks) - {b.index for b in blocks if _is_final_loop(instructions, b)}
    return tuple(replace(b, successors=tuple(sorted(lost.union(b.successors)))) for b in blocks) if lost else tuple(blocks)


def _may_fall_through(last: Instruction) -> bool:
    """Return whether the instruction behind a block's last may be next.

    A branch can depend on more than its guard: `BRA P1`, `BRA.DIV UR4` and the like name the condition.
    """
    if last.opcode not in NEVER_FALLS_THROUGH or last.predicate is not None:
        return True
    return last.opcode != "RET" and any(not _TARGET.match(operand) for operand in last.operands)


class Worklist:
    """Indices of blocks that an analysis has still to visit, each once, lowest first, so that few are visited again."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._heap = sorted(indices)
        self._waiting = set(self._heap)

    def __iter__(self) -> Iterator[int]:
        while self._heap:
            index = heapq.heappop(self._heap)
            self._waiting.remove(index)
            yield index

    def add(self, index: int) -> None:
        """Visit a block once more."""
        if index not in self._waiting:
            self._waiting.add(index)
            heapq.heappush(self._heap, index)


def _unreached(blocks: Sequence[Block]) -> frozenset[int]:
    """Return the blocks that no path from the first one reaches."""
    seen = {0}
    work = [0]
    while work:
        new = set(blocks[work.pop()].successors) - seen
        seen |= new
        work += new
    return frozenset(range(len(blocks))) - seen


def _is_final_loop(instructions: Sequence[Instruction], block: Block) -> bool:
    """Return whether a block is the unreachable branch to itself that ends every kernel."""
    return block.stop - block.start == 1 and instructions[block.start].opcode == "BRA" and block.successors == (block.index,)
