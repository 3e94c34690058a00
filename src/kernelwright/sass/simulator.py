"""Simulates the in-order issue of one scheduler's warps: a cost model for tests and for ranking schedules.

Nothing here is a time of a GPU. The model knows stall counts, yields, scoreboards, barriers between warps,
execution ports and fixed guesses at the latency of memory; it knows no caches, no bandwidth, no bank
conflicts and no operand cache, and each loop is passed through a fixed number of times.

`ideal_cycles` bounds from below what any legal schedule of the same kernel would take in the same model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kernelwright.sass.dependences import accesses, constrain
from kernelwright.sass.instruction import SCOREBOARDS, Instruction
from kernelwright.sass.latency import Dependence, port_of
from kernelwright.sass.neighbours import loop_slots
from kernelwright.sass.opcodes import Pipe, Space
from kernelwright.sass.program import Kernel
from kernelwright.sass.schedule import Schedule
from kernelwright.sass.scoreboards import TokenKind, analyse_scoreboards, waits_of

_LONGEST_TRACE = 200_000
_WIDE_FMA_ARCHITECTURE = 86
_GLOBAL_CYCLES = 500
_BARRIER_CYCLES = 10
_SOURCE_READ_CYCLES = 12
"""Huerta et al. (arXiv 2503.20481) measure 9 to 14 between LDS, STS, LDG and STG."""
_RESULT_CYCLES = {"LDS": 24, "LDSM": 33, "LDC": 29, "LDCU": 29, "S2R": 25, "S2UR": 25, "SHFL": 24, "MUFU": 22}
"""LDS and LDC: Huerta et al.; the others are our choice, of the size that is commonly measured."""
_OTHER_RESULT_CYCLES = 20
_ASYNC_TENSOR_CYCLES = 128
_OCCUPANCY_CYCLES = {
    "alu": 2,
    "fma": 2,
    "slow": 16,
    "tensor": 8,
    "uniform": 2,
    "memory": 4,
    "special-function": 8,
    "constant": 4,
    "special-register": 4,
}
"""Cycles for which a warp's instruction holds a port of one scheduler: 32 lanes over the port's width."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Least cycles of any legal schedule in the model; `limits` maps a limit's name to its cycles, the largest binds."""

    cycles: int
    limits: dict[str, int]

    @property
    def limited_by(self) -> str:
        """The name of the limit that binds."""
        return max(self.limits, key=lambda name: self.limits[name])


@dataclass(frozen=True, slots=True)
class _Step:
    """Properties of one instruction in the model, independent of its place."""

    port: str | None
    occupancy: int
    waits: tuple[int, ...]
    write_barrier: int | None
    read_barrier: int | None
    result_cycles: int
    is_copy: bool
    closes_copies: bool
    is_barrier: bool
    starts_tensor: bool
    drain: tuple[int, int] | None
    """(scoreboard, how many may be outstanding) of a DEPBAR; scoreboard -1 is that of HGMMA."""


@dataclass(slots=True)
class _Warp:
    position: int = 0
    ready: int = 0
    counted: list[list[int]] = field(default_factory=lambda: [[] for _ in SCOREBOARDS])
    """For each scoreboard: completion times of its operations, ascending."""
    copies_done: int = 0
    tensor: list[int] = field(default_factory=list)
    arrived: int | None = None
    done: bool = False


def simulate(schedule: Schedule, architecture: int, warps: int = 4, iterations: int = 4) -> int:
    """Return the cycles that one scheduler takes for its warps, all on the same path, in the model.

    `architecture` is the compute capability times ten; each loop is passed through `iterations` times.
    """
    steps = _steps(schedule.kernel, architecture)
    controls = schedule.controls()
    code = [(steps[i], max(1, c.stall), c.yields) for i, c in zip(schedule.order, controls, strict=True)]
    path = _path(schedule.kernel, iterations)
    free = dict.fromkeys(_OCCUPANCY_CYCLES, 0)
    running = [_Warp() for _ in range(warps)]
    clock = 0
    current = running[0]
    prefers = True
    while True:
        best, best_time = None, 0
        # Oldest first, but the current warp goes on while it may and has not yielded.
        for warp in (current, *running) if prefers else (*(w for w in running if w is not current), current):
            if warp.done or warp.arrived is not None:
                continue
            step = code[path[warp.position]][0]
            time = warp.ready if step.port is None else max(warp.ready, free[step.port])
            if step.waits or step.drain:
                time = max(time, _waited(step, warp))
            if best is None or time < best_time:
                best, best_time = warp, time
            if time <= clock:
                break
        if best is None:
            waiting = [w for w in running if w.arrived is not None]
            if not waiting:
                return clock
            _release(waiting)
            continue
        best_time = max(best_time, clock)
        step, stall, yields = code[path[best.position]]
        _issue(step, best, best_time, free)
        best.ready = best_time + stall
        best.position += 1
        best.done = best.position == len(path)
        clock = max(best_time + 1, best.ready if best.done else 0)
        current, prefers = best, not yields


def ideal_cycles(kernel: Kernel, architecture: int, warps: int = 4, iterations: int = 4) -> Bound:
    """Return a lower bound of the cycles of any legal schedule of `kernel` in the model of `simulate`.

    Each block takes at least its longest chain of dependences, its issue slots and its busiest port; no instruction
    leaves its block. All warps together need an issue slot for every instruction, and the ports.
    """
    steps = _steps(kernel, architecture)
    chains = _longest_chains(kernel, steps)
    path = _path(kernel, iterations)
    visits, busy = Counter(path), Counter[str]()
    one_warp = 0
    for block in kernel.blocks:
        times = visits[block.start]
        in_block = Counter[str]()
        for step in steps[block.start : block.stop]:
            if step.port is not None:
                in_block[step.port] += step.occupancy
        for port, cycles in in_block.items():
            busy[port] += times * cycles
        # The last operation of a port may still hold it when the next block begins.
        widest = max((cycles - _OCCUPANCY_CYCLES[port] for port, cycles in in_block.items()), default=0)
        one_warp += times * max(chains[block.index], block.stop - block.start, widest)
    limits = {"one warp's chain": one_warp, "issue slots": warps * len(path)}
    limits |= {f"{port} port": warps * cycles - _OCCUPANCY_CYCLES[port] for port, cycles in busy.items()}
    return Bound(max(limits.values()), limits)


def _waited(step: _Step, warp: _Warp) -> int:
    time = 0
    for scoreboard in step.waits:
        if warp.counted[scoreboard]:
            time = max(time, warp.counted[scoreboard][-1])
    if step.drain is not None:
        scoreboard, allowed = step.drain
        pending = warp.tensor if scoreboard < 0 else warp.counted[scoreboard]
        if len(pending) > allowed:
            time = max(time, pending[-1 - allowed])
    return time


def _issue(step: _Step, warp: _Warp, now: int, free: dict[str, int]) -> None:
    if step.port is not None:
        free[step.port] = now + step.occupancy
    if step.is_copy:
        warp.copies_done = max(warp.copies_done, now + step.result_cycles)
    if step.starts_tensor:
        warp.tensor.append(now + _ASYNC_TENSOR_CYCLES)
    if step.write_barrier is not None:
        done = warp.copies_done if step.closes_copies else now + step.result_cycles
        _count(warp.counted[step.write_barrier], done)
    if step.read_barrier is not None:
        _count(warp.counted[step.read_barrier], now + _SOURCE_READ_CYCLES)
    if step.is_barrier:
        warp.arrived = now


def _count(pending: list[int], done: int) -> None:
    pending.append(max(done, pending[-1]) if pending else done)


def _release(waiting: Sequence[_Warp]) -> None:
    together = max(w.arrived or 0 for w in waiting) + _BARRIER_CYCLES
    for warp in waiting:
        warp.arrived = None
        warp.ready = max(warp.ready, together)


@lru_cache(maxsize=64)
def _steps(kernel: Kernel, architecture: int) -> tuple[_Step, ...]:
    return tuple(_step(instruction, architecture) for instruction in kernel.instructions)


def _step(instruction: Instruction, architecture: int) -> _Step:
    port = port_of(instruction)
    family = None if port is None else port.family
    occupancy = 0 if family is None else _OCCUPANCY_CYCLES[family]
    if family == "fma" and architecture >= _WIDE_FMA_ARCHITECTURE and instruction.traits.pipe is Pipe.FMA:
        occupancy = 1
    control = instruction.control
    closes = instruction.opcode == "LDGDEPBAR"
    return _Step(
        port=family,
        occupancy=occupancy,
        waits=tuple(i for i in SCOREBOARDS if waits_of(instruction) >> i & 1),
        write_barrier=0 if closes and control.write_barrier is None else control.write_barrier,
        read_barrier=control.read_barrier,
        result_cycles=_latency(instruction),
        is_copy=instruction.opcode == "LDGSTS",
        closes_copies=closes,
        is_barrier=instruction.opcode == "BAR" and "SYNC" in instruction.modifiers,
        starts_tensor=instruction.opcode.endswith("GMMA"),
        drain=_drain(instruction),
    )


def _latency(instruction: Instruction) -> int:
    if Space.GLOBAL in instruction.traits.reads | instruction.traits.writes and instruction.traits.is_memory:
        return _GLOBAL_CYCLES
    return _RESULT_CYCLES.get(instruction.opcode, _OTHER_RESULT_CYCLES)


def _drain(instruction: Instruction) -> tuple[int, int] | None:
    if "DEPBAR" not in (instruction.opcode, *instruction.modifiers) or len(instruction.operands) < 2:
        return None
    scoreboard, count = instruction.operands[:2]
    try:
        allowed = int(count, 0)
    except ValueError:
        return None
    if scoreboard.startswith("SB") and scoreboard[2:].isdigit():
        return int(scoreboard[2:]), allowed
    return (-1, allowed) if scoreboard.startswith("gsb") else None


@lru_cache(maxsize=64)
def _path(kernel: Kernel, iterations: int) -> tuple[int, ...]:
    """Return the slots a warp executes: every loop `iterations` times, and the branches that lead to most work."""
    work = _work_ahead(kernel, iterations)
    path: list[int] = []
    passes: dict[int, int] = {}
    index = 0
    while len(path) < _LONGEST_TRACE:
        block = kernel.blocks[index]
        path.extend(range(block.start, block.stop))
        back = [s for s in block.successors if s <= index]
        onward = [s for s in block.successors if s > index]
        passes[index] = passes.get(index, 1) + 1 if back else 1
        if back and passes[index] <= iterations:
            index = back[0]
        elif onward:
            passes.pop(index, None)
            index = max(onward, key=lambda s: (work[s], -s))
        else:
            break
    return tuple(path)


def _work_ahead(kernel: Kernel, iterations: int) -> list[int]:
    """Return for each block the most instructions on any way down from it, loops counted `iterations` times."""
    looped = loop_slots(kernel)
    work = [0] * len(kernel.blocks)
    for block in reversed(kernel.blocks):
        own = (block.stop - block.start) * (iterations if block.start in looped else 1)
        work[block.index] = own + max((work[s] for s in block.successors if s > block.index), default=0)
    return work


@lru_cache(maxsize=64)
def _longest_chains(kernel: Kernel, steps: tuple[_Step, ...]) -> tuple[int, ...]:
    """Return for each block the least cycles between its first and last issue that dependences allow."""
    instructions = kernel.instructions
    waited: dict[int, list[tuple[int, int]]] = {}
    for token, waiter in analyse_scoreboards(instructions, kernel.blocks).cleared:
        producer = token.producer
        reads = token.kind is TokenKind.READ and steps[producer].read_barrier is not None
        cycles = _SOURCE_READ_CYCLES if reads else steps[producer].result_cycles
        waited.setdefault(waiter, []).append((producer, cycles))
    chains = []
    for constraints in constrain(kernel):
        block = constraints.block
        edges = {v: dict(sources) for v, sources in constraints.predecessors.items()}
        for v in edges:
            for u, cycles in waited.get(v, ()):
                if block.start <= u < v:
                    edges[v][u] = max(edges[v].get(u, 0), cycles)
        for u, v, _, kind in accesses(instructions, range(block.start, block.stop)):
            if kind is Dependence.RAW and instructions[u].is_variable_latency and steps[u].write_barrier is not None:
                edges[v][u] = max(edges[v].get(u, 0), steps[u].result_cycles)
        times: dict[int, int] = {}
        for v in range(block.start, block.stop):
            times[v] = max((times[u] + cycles for u, cycles in edges[v].items()), default=0)
        chains.append(max(times.values()))
    return tuple(chains)
