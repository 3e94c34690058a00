"""Kernels of the corpus, compiled and disassembled once per test process, and ways to break them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from kernelwright.gpu import disassemble
from kernelwright.gpu.target import CORPUS, corpus_specs
from kernelwright.sass import ANY_MOVE, ControlWord, Kernel, Neighbourhood, Program, Schedule, load
from kernelwright.sass.latency import is_guarded

NAMES = tuple(CORPUS)
ARCHITECTURES = (80, 89, 90)
ALL_SAMPLES = [(name, architecture) for architecture in ARCHITECTURES for name in NAMES]


@dataclass(frozen=True, eq=False)
class Sample:
    """A compiled kernel and its program."""

    cubin: bytes
    program: Program

    @property
    def kernel(self) -> Kernel:
        return self.program.kernels[0]

    @property
    def words(self) -> list[int]:
        return [i.word for i in self.kernel.instructions]

    def with_words(self, words: list[int]) -> bytes:
        return self.program.with_words({self.kernel.name: words})

    def reordered(self, source: int, target: int) -> bytes:
        """The cubin with one instruction taken elsewhere, control words going along."""
        words = self.words
        words.insert(target, words.pop(source))
        return self.with_words(words)

    def with_control(self, index: int, **changes: object) -> bytes:
        """The cubin with one control word changed."""
        return self.with_controls({index: changes})

    def with_controls(self, changes: Mapping[int, Mapping[str, object]]) -> bytes:
        """The cubin with several control words changed, by index."""
        words = self.words
        for index, fields in changes.items():
            control = replace(self.kernel.instructions[index].control, **fields)
            words[index] = control.encode(words[index])
        return self.with_words(words)

    def same_block_pairs(self, reach: int = 12) -> Iterator[tuple[int, int]]:
        """Pairs of movable slots of one block with nothing pinned between."""
        for block in self.kernel.blocks:
            for i in range(block.start, block.stop):
                if i in self.kernel.fixed:
                    continue
                for j in range(i + 1, min(block.stop, i + reach)):
                    if j in self.kernel.fixed:
                        break
                    yield i, j


@cache
def compiled(name: str, architecture: int) -> bytes:
    return corpus_specs()[name].build(name, architecture).cubin


_listings: dict[bytes, str] = {}


def remembering(cubin: bytes) -> str:
    """A disassembler that remembers what the compiler made; mutated cubins are always read anew."""
    return _listings[cubin] if cubin in _listings else disassemble(cubin)


@cache
def build(name: str, architecture: int) -> Sample:
    cubin = compiled(name, architecture)
    _listings[cubin] = disassemble(cubin)
    return Sample(cubin, load(cubin, remembering))


@cache
def retuned(cubin: bytes, kernel: str | None = None, seed: int = 0) -> bytes:
    """A legal re-schedule, as a search might find it."""
    program = load(cubin, disassemble)
    schedule, rng = Schedule(program.kernel(kernel)), random.Random(seed)
    while not schedule.moved:
        if (move := ANY_MOVE.draw(schedule, rng)) is not None:
            schedule.play(move)
    return schedule.cubin(program)


_NOP = 0x000FC00000000000 << 64 | 0x7918


def word(payload: int, text: str) -> int:
    """An instruction with a control word, spelled as `ControlWord` prints it: `B-1----:R0:W-:-:S04:---`."""
    waits, reads, writes, yields, stall, reuse = text.split(":")

    def scoreboard(field: str) -> int | None:
        return None if field[1] == "-" else int(field[1])

    control = ControlWord(
        stall=int(stall[1:]),
        yields=yields == "Y",
        write_barrier=scoreboard(writes),
        read_barrier=scoreboard(reads),
        wait_mask=sum(1 << i for i in range(6) if waits[1 + i] != "-"),
        reuse=sum(1 << i for i in range(3) if reuse[i] != "-"),
    )
    return control.encode(payload)


def hand_made(words: list[int], architecture: int) -> bytes:
    """A cubin whose kernel is these instructions: a compiled one with its code replaced."""
    sample = build("softmax", architecture)
    section = sample.kernel.code.section
    padded = [*words, *[_NOP] * (section.size_bytes // 16 - len(words))]
    code = b"".join(w.to_bytes(16, "little") for w in padded)
    data = sample.cubin
    return data[: section.offset_bytes] + code + data[section.offset_bytes + section.size_bytes :]


def first_pair(
    architectures: tuple[int, ...], names: tuple[str, ...], wanted: Callable[[Sample, int, int], bool]
) -> Iterator[tuple[Sample, int, int]]:
    """Yield, for each architecture, the first pair of instructions that is as wanted."""
    for architecture in architectures:
        for name in names:
            sample = build(name, architecture)
            found = next(((i, j) for i, j in sample.same_block_pairs() if wanted(sample, i, j)), None)
            if found:
                yield sample, *found
                break
        else:
            raise AssertionError(f"no kernel for sm_{architecture} has such a pair")


def def_use_graph(kernel: Kernel, names: list[int]) -> set[tuple[int, int, str]]:
    """Edges (definition, use, register) over all paths; `names[i]` is what to call instruction i.

    Plain reaching definitions over the control-flow graph, without any of the package's analyses.
    """
    instructions = kernel.instructions
    entry: list[dict[str, set[int]]] = [{} for _ in kernel.blocks]
    edges: set[tuple[int, int, str]] = set()
    work = list(range(len(kernel.blocks)))
    while work:
        block = kernel.blocks[work.pop()]
        alive = {register: set(defs) for register, defs in entry[block.index].items()}
        for i in range(block.start, block.stop):
            for register in instructions[i].uses:
                edges |= {(names[d], names[i], register) for d in alive.get(register, ())}
            for register in instructions[i].defs:
                kept = alive.get(register, set()) if is_guarded(instructions[i]) else set()
                alive[register] = kept | {i}
        for successor in block.successors:
            target = entry[successor]
            if any(not defs <= target.get(register, set()) for register, defs in alive.items()):
                for register, defs in alive.items():
                    target[register] = target.get(register, set()) | defs
                work.append(successor)
    return edges


def play_random(schedule, rng, moves, neighbourhood=None):
    """Play up to `moves` random legal moves, fewer where no more are found, and return them."""
    chosen = neighbourhood or Neighbourhood()
    played = []
    for _ in range(moves):
        move = chosen.draw(schedule, rng)
        if move is None:
            break
        schedule.play(move)
        played.append(move)
    return played
