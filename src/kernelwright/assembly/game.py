"""Gives the assembly game of CuAsmRL (arXiv 2501.08071), and a wider one, as Gymnasium environments.

The player re-orders the machine code of one kernel, one legal move after another, to make it faster. Every state that can
be reached computes the same: illegal moves are masked, and stall counts are derived anew after each move
(`kernelwright.sass`). `docs/assembly-game.md` describes actions, rewards and the end of an episode.

Action `c * len(operations) + o` applies the o-th operation to the c-th candidate instruction; the last action stops the
episode. Candidates are numbered by their place in the original code and keep their number while they move.

An observation is `Box(0, 1, (instructions, 18), float32)`, one row for each slot of the current order:

| column | meaning |
| --- | --- |
| 0-5 | waits for scoreboard 0-5 |
| 6, 7 | has a read, write scoreboard |
| 8, 9 | (its number + 1) / 6; 0 where it has none |
| 10 | yields |
| 11 | stall count / 15 |
| 12 | is guarded |
| 13 | accesses memory |
| 14 | execution pipe, as a fraction of the number of pipes |
| 15 | pinned |
| 16, 17 | how far it may go up, down by its dependences / instructions |

The wider game has seven more columns:

| column | meaning |
| --- | --- |
| 18 | opcode, as a fraction of the kernel's opcodes |
| 19, 20-22 | first register written, first three registers read: (number + 1) / 256 |
| 23 | inside a loop |
| 24 | reuse bits / 7 |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from kernelwright.assembly.backends import Backend, SimulatedIssue, StaticIssueCycles, schedule_digest
from kernelwright.assembly.budget import PAPER_HORIZON
from kernelwright.errors import UsageError
from kernelwright.sass import (
    AnyMove,
    ClusterMove,
    HintEdit,
    Kernel,
    Move,
    MoveError,
    Program,
    ReuseEdit,
    Schedule,
    StallEdit,
    YieldEdit,
    move_from_json,
    move_to_json,
)
from kernelwright.sass.instruction import MAX_STALL
from kernelwright.sass.neighbours import loop_slots
from kernelwright.sass.opcodes import Pipe
from kernelwright.sass.reuse import OPERAND_SLOTS

__all__ = [
    "BEYOND",
    "BEYOND_ID",
    "ENVIRONMENT_ID",
    "AssemblyGameEnv",
    "Backend",
    "BeyondGameEnv",
    "SimulatedIssue",
    "StaticIssueCycles",
    "replay",
    "schedule_digest",
]

ENVIRONMENT_ID = "kernelwright/AssemblyGame-v0"
BEYOND_ID = "kernelwright/BeyondAssemblyGame-v0"
"""A name of its own: a higher version would make Gymnasium call the paper's game out of date."""
PAPER_OFFSETS = (-1, 1)
FAILED_REWARD = -1.0
"""Reward of a schedule that fails its test, in CuAsmRL's code."""
BEYOND = (
    "move-8", "move-2", "move-1", "move+1", "move+2", "move+8", "cluster-4", "cluster-1", "cluster+1", "cluster+4",
    "stall+1", "stall-1", "yield", "reuse0", "reuse1", "hint1", "hint3", "hint4", "hint24",
)  # fmt: skip
"""Operations of the wider game; our choice. From no hint, the last four lead to EF, EL, NA and LTC256B and back."""
MAX_CANDIDATES = 48
"""Our choice: as many as CuAsmRL finds memory instructions in a matrix product."""
_OPERATION = re.compile(r"^(?:(move|cluster|stall)([+-][1-9]\d*)|(yield)|(reuse)([0-2])|(hint)([1-9]\d*))$")
_LONGEST_CLUSTER = 8
_COLUMNS = 18
_MORE_COLUMNS = 7
_REGISTERS = 256
_PIPES = {pipe: index for index, pipe in enumerate(Pipe)}

Observation = npt.NDArray[np.float32]


def replay(program: Program, moves: Iterable[AnyMove | Sequence[str | int]], kernel_name: str | None = None) -> Schedule:
    """Return the schedule that a list of moves leads to from the original.

    Args:
        moves: moves, or their JSON form as in `info["moves"]` and in records (`kernelwright.sass.move_to_json`).
        kernel_name: which kernel of `program`, when there are several.

    Raises:
        MoveError: something is no move, or a move is not legal where it stands in the list.
        UsageError: `program` is none, or the choice of its kernel is not clear.
    """
    schedule = Schedule(_kernel_of(program, kernel_name))
    for move in moves:
        schedule.play(move if isinstance(move, AnyMove) else move_from_json(move))
    return schedule


def _kernel_of(program: object, kernel_name: str | None) -> Kernel:
    if not isinstance(program, Program):
        raise UsageError(
            f"wanted a disassembled program to play on, found {type(program).__name__}; "
            "make one of a cubin's bytes: kernelwright.sass.load(cubin, kernelwright.gpu.disassemble)"
        )
    return program.kernel(kernel_name)


class AssemblyGameEnv(gymnasium.Env[Observation, np.int64]):
    """The paper's game; the module's docstring describes spaces and reward.

    Args:
        kernel_name: which kernel of `program`, when there are several.
        backend: measures schedules; `StaticIssueCycles` when None.
        offsets: slots by which a move takes an instruction; none may be zero.
        memory_only: whether only memory instructions may be moved.
        horizon: moves after which an episode is truncated.
        may_stop: whether the stop action is allowed where another one is; the paper masks it in training.

    Raises:
        UsageError: the program is none, an offset or the horizon makes no sense, or nothing can be moved.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 - Gymnasium's own declaration.

    def __init__(
        self,
        program: Program,
        kernel_name: str | None = None,
        backend: Backend | None = None,
        offsets: tuple[int, ...] = PAPER_OFFSETS,
        memory_only: bool = True,
        horizon: int = PAPER_HORIZON,
        render_mode: str | None = None,
        may_stop: bool = True,
    ) -> None:
        if not offsets or 0 in offsets or len(set(offsets)) != len(offsets):
            raise UsageError(f"wanted distinct offsets other than zero, found {offsets}")
        self.offsets = offsets
        self._memory_only = memory_only
        self._may_stop = may_stop
        operations = tuple(f"move{offset:+d}" for offset in offsets)
        self._set_up(program, kernel_name, backend, operations, horizon, render_mode)

    def _set_up(
        self,
        program: Program,
        kernel_name: str | None,
        backend: Backend | None,
        operations: tuple[str, ...],
        horizon: int,
        render_mode: str | None,
    ) -> None:
        if horizon < 1:
            raise UsageError(f"wanted a horizon of at least one move, found {horizon}")
        kernel = _kernel_of(program, kernel_name)
        self.program = program
        self.backend: Backend = StaticIssueCycles() if backend is None else backend
        self.operations = operations
        self._operations = tuple(_parsed(operation) for operation in operations)
        self.horizon = horizon
        self.render_mode = render_mode
        self.schedule = Schedule(kernel)
        self.candidates = self._candidates()
        if not self.candidates:
            raise UsageError(f"wanted something to move in {self.schedule.kernel.name}, found nothing")
        self.stop_action = len(self.candidates) * len(operations)
        self.action_space = gymnasium.spaces.Discrete(self.stop_action + 1)
        self._constant = self._constant_columns()
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, self._constant.shape, np.float32)
        self._initial = self._now = self.backend.measure(self.schedule)
        if self._initial.relative is None:
            raise UsageError(f"wanted a cost of the original, found {self._initial.status}: {self._initial.detail}")
        self._steps = 0

    def _candidates(self) -> tuple[int, ...]:
        instructions = self.schedule.kernel.instructions
        slots = self.schedule.movable_slots
        return tuple(s for s in slots if not self._memory_only or instructions[s].traits.is_memory)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Return to the original schedule."""
        super().reset(seed=seed)
        while self.schedule.history:
            self.schedule.undo()
        self._now = self._initial
        self._steps = 0
        return self._observation(), self._info()

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Play one move, or stop.

        Raises:
            MoveError: the action is masked; nothing has changed.
        """
        move = self.move_of(int(action))
        is_legal = move is not None or (int(action) == self.stop_action and self.action_masks()[-1])
        if not is_legal:
            raise MoveError(f"wanted an action that the mask allows, found {int(action)}; choose by action_masks()")
        self._steps += 1
        truncated = self._steps >= self.horizon
        if move is None:
            return self._observation(), 0.0, True, truncated, self._info()
        self.schedule.play(move)
        before, self._now = self._now, self.backend.measure(self.schedule)
        if self._now.relative is None or before.relative is None:
            return self._observation(), FAILED_REWARD, True, truncated, self._info()
        reward = self._reward(before.relative, self._now.relative)
        return self._observation(), reward, False, truncated, self._info()

    def _reward(self, before: float, after: float) -> float:
        return 100.0 * (before - after)

    def move_of(self, action: int) -> AnyMove | None:
        """Return the move that an action stands for now, or None if it is illegal or stops."""
        if not 0 <= action < self.stop_action:
            return None
        candidate, number = divmod(action, len(self._operations))
        slot = self.schedule.slot_of(self.candidates[candidate])
        kind, amount = self._operations[number]
        move: AnyMove
        if kind == "move":
            move = Move(slot, slot + amount)
        elif kind == "cluster":
            move = ClusterMove(slot, self._run_length(slot), slot + amount)
        elif kind == "stall":
            move = StallEdit(slot, amount)
        elif kind == "yield":
            move = YieldEdit(slot)
        elif kind == "hint":
            move = HintEdit(slot, amount)
        else:
            move = ReuseEdit(slot, amount)
        return move if self.schedule.is_legal(move) else None

    def _run_length(self, slot: int) -> int:
        """Return the number of instructions from `slot` on of one kind, which a cluster move takes along; at least 2."""
        instructions, order = self.schedule.kernel.instructions, self.schedule.order
        opcode = instructions[order[slot]].opcode
        stop = slot + 1
        while stop < min(len(order), slot + _LONGEST_CLUSTER) and instructions[order[stop]].opcode == opcode:
            stop += 1
        return max(2, stop - slot)

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return which actions are legal; the name is the one MaskablePPO looks for.

        Stopping is, where nothing else is or `may_stop` was given.
        """
        mask = [self.move_of(action) is not None for action in range(self.stop_action)]
        return np.array([*mask, self._may_stop or not any(mask)])

    def render(self) -> str:
        """Return the current schedule as text."""
        instructions = self.schedule.kernel.instructions
        lines = zip(self.schedule.order, self.schedule.controls(), strict=True)
        return "\n".join(f"{control}  {instructions[index].text}" for index, control in lines)

    def _info(self) -> dict[str, Any]:
        return {
            "backend": self.backend.name,
            "unit": self.backend.unit,
            "status": self._now.status,
            "cost": self._now.cost,
            "initial_cost": self._initial.cost,
            "moves": [move_to_json(move) for move in self.schedule.history],
        }

    def _constant_columns(self) -> Observation:
        """Rows of what an instruction takes along when it moves, by its original index."""
        kernel = self.schedule.kernel
        rows = np.zeros((len(kernel.instructions), _COLUMNS), np.float32)
        for index, instruction in enumerate(kernel.instructions):
            control = instruction.control
            row = rows[index]
            row[:6] = [control.wait_mask >> i & 1 for i in range(6)]
            for column, scoreboard in ((6, control.read_barrier), (7, control.write_barrier)):
                if scoreboard is not None:
                    row[column], row[column + 2] = 1.0, (scoreboard + 1) / 6
            row[12] = instruction.predicate is not None
            row[13] = instruction.traits.is_memory
            row[14] = _PIPES[instruction.traits.pipe] / len(_PIPES)
            row[15] = index in kernel.fixed
        return rows

    def _observation(self) -> Observation:
        rows: Observation = self._constant[self.schedule.order].copy()
        count = len(rows)
        for slot, control in enumerate(self.schedule.controls()):
            window = self.schedule.window(slot)
            rows[slot, 10] = control.yields
            rows[slot, 11] = control.stall / MAX_STALL
            rows[slot, 16] = (slot - window[0]) / count
            rows[slot, 17] = (window[-1] - slot) / count
        return rows


class BeyondGameEnv(AssemblyGameEnv):
    """The wider game: any instruction, farther moves, and edits of control words.

    Candidates are taken from inside loops first, and memory instructions and tensor operations before others.

    Args:
        operations: names out of `move`, `cluster` and `stall` with a signed number, `yield`, `reuse0` to `reuse2`, and
        `hint` with the flips of a `HintEdit`.
        max_candidates: number of instructions that may be chosen.

    Raises:
        UsageError: the program is none, an operation, the number of candidates or the horizon makes no sense, or nothing
        can be moved.
    """

    def __init__(
        self,
        program: Program,
        kernel_name: str | None = None,
        backend: Backend | None = None,
        operations: tuple[str, ...] = BEYOND,
        max_candidates: int = MAX_CANDIDATES,
        may_stop: bool = False,
        horizon: int = PAPER_HORIZON,
        render_mode: str | None = None,
    ) -> None:
        if not operations or len(set(operations)) != len(operations) or max_candidates < 1:
            raise UsageError(f"wanted distinct operations and candidates, found {operations} and {max_candidates}")
        self._max_candidates = max_candidates
        self._may_stop = may_stop
        self._set_up(program, kernel_name, backend, operations, horizon, render_mode)

    def _candidates(self) -> tuple[int, ...]:
        instructions = self.schedule.kernel.instructions
        inside = loop_slots(self.schedule.kernel)
        ranked = []
        for slot in self.schedule.movable_slots:
            traits = instructions[slot].traits
            ranked.append((slot not in inside, not (traits.is_memory or traits.pipe is Pipe.TENSOR), slot))
        return tuple(sorted(slot for *_, slot in sorted(ranked)[: self._max_candidates]))

    def _reward(self, before: float, after: float) -> float:
        return 100.0 * (1.0 / after - 1.0 / before)

    def _constant_columns(self) -> Observation:
        kernel = self.schedule.kernel
        rows = np.zeros((len(kernel.instructions), _MORE_COLUMNS), np.float32)
        opcodes = sorted({instruction.opcode for instruction in kernel.instructions})
        inside = loop_slots(kernel)
        for index, instruction in enumerate(kernel.instructions):
            written = sorted(int(name[1:]) for name in instruction.defs if name[0] == "R")
            read = sorted(int(name[1:]) for name in instruction.uses if name[0] == "R")
            rows[index, 0] = opcodes.index(instruction.opcode) / len(opcodes)
            rows[index, 1] = (written[0] + 1) / _REGISTERS if written else 0.0
            for column, number in enumerate(read[:3], 2):
                rows[index, column] = (number + 1) / _REGISTERS
            rows[index, 5] = index in inside
        return np.concatenate([super()._constant_columns(), rows], axis=1)

    def _observation(self) -> Observation:
        rows = super()._observation()
        most = (1 << len(OPERAND_SLOTS)) - 1
        rows[:, _COLUMNS + 6] = [control.reuse / most for control in self.schedule.controls()]
        return rows


def _parsed(operation: str) -> tuple[str, int]:
    match = _OPERATION.match(operation)
    if match is None:
        raise UsageError(f"wanted an operation such as move+4, stall-1, yield or reuse0, found {operation!r}")
    signed, amount, plain, reuse, operand, hint, flips = match.groups()
    return signed or plain or reuse or hint, int(amount or operand or flips or 0)


gymnasium.register(id=ENVIRONMENT_ID, entry_point="kernelwright.assembly.game:AssemblyGameEnv")
gymnasium.register(id=BEYOND_ID, entry_point="kernelwright.assembly.game:BeyondGameEnv")
