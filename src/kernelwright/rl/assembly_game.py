"""The assembly game of CuAsmRL (arXiv 2501.08071) as a Gymnasium environment.

## Description

The player re-orders the machine code of one kernel, one legal move after another, to make it faster.
Every state that can be reached computes the same: illegal moves are masked, and stall counts are derived
anew after each move (`kernelwright.sass`).

## Action space

`Discrete(candidates * offsets + 1)`. Action `c * len(offsets) + o` takes the c-th candidate instruction
`offsets[o]` slots further; the last action stops the episode. Candidates are numbered by their place in the
original code and keep their number while they move. By default they are the memory instructions and the
offsets are (-1, 1), as in the paper; `memory_only=False` and other offsets go beyond it. `action_masks()`
says which actions are legal now; an illegal one raises `MoveError`.

## Observation space

`Box(0, 1, (instructions, 18), float32)`, one row for each slot of the current order:

| column | meaning |
| --- | --- |
| 0-5 | waits for scoreboard 0-5 |
| 6, 7 | has a read, write scoreboard |
| 8, 9 | its number / 6 |
| 10 | yields |
| 11 | stall count / 15 |
| 12 | is guarded |
| 13 | accesses memory |
| 14 | execution pipe, as a fraction of the number of pipes |
| 15 | pinned |
| 16, 17 | how far it may go up, down by its dependences / instructions |

## Reward

`100 * (cost before - cost after) / cost of the original`, where the backend says what cost is. A move that
costs nothing gives 0.

## Start state, end

The original schedule. `terminated` after the stop action, `truncated` after `horizon` moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt

from kernelwright.errors import UsageError
from kernelwright.sass import Move, MoveError, Program, Schedule
from kernelwright.sass.control import MAX_STALL
from kernelwright.sass.opcodes import Pipe

ENVIRONMENT_ID = "kernelwright/AssemblyGame-v0"
PAPER_OFFSETS = (-1, 1)
PAPER_HORIZON = 32
_COLUMNS = 18
_PIPES = {pipe: index for index, pipe in enumerate(Pipe)}

Observation = npt.NDArray[np.float32]


class Backend(Protocol):
    """Says what a schedule costs.

    Attributes:
        name: what is measured or simulated.
        unit: unit of the cost.
    """

    name: str
    unit: str

    def cost(self, schedule: Schedule) -> float:
        """Return the cost of a schedule, more than zero; less is better."""
        ...


class StaticIssueCycles:
    """Sum of stall counts: cycles in which one warp issues each instruction once. Not a time of any GPU.

    It knows neither loops, waits for memory nor other warps. It is for tests and for sorting moves.
    """

    name = "static-issue-cycles"
    unit = "issue cycles"

    def cost(self, schedule: Schedule) -> float:
        """Return the sum of stall counts."""
        return float(schedule.issue_cycles)


class RecordedTimings:
    """Times measured earlier, by the digest of the schedule's code; see `schedule_digest`."""

    name = "recorded-timings"
    unit = "us"

    def __init__(self, times_us: Mapping[str, float]) -> None:
        self.times_us = dict(times_us)

    def cost(self, schedule: Schedule) -> float:
        """Return the recorded time.

        Raises:
            UsageError: this schedule was not recorded.
        """
        digest = schedule_digest(schedule)
        if digest not in self.times_us:
            raise UsageError(
                f"wanted a recorded time of schedule {digest[:12]}, found none among {len(self.times_us)}; "
                "record it, or use another backend"
            )
        return self.times_us[digest]


def schedule_digest(schedule: Schedule) -> str:
    """Return the SHA-256 of a schedule's instruction words, in hexadecimal."""
    return hashlib.sha256(b"".join(word.to_bytes(16, "little") for word in schedule.words())).hexdigest()


def replay(program: Program, moves: Iterable[Move], kernel_name: str | None = None) -> Schedule:
    """Return the schedule that a list of moves leads to from the original.

    Raises:
        MoveError: a move is not legal where it stands in the list.
    """
    schedule = Schedule(program.kernel(kernel_name))
    for move in moves:
        schedule.play(move)
    return schedule


class AssemblyGameEnv(gymnasium.Env[Observation, np.int64]):
    """The environment; the module's docstring describes spaces and reward.

    Args:
        program: the cubin to play on.
        kernel_name: which of its kernels, when there are several.
        backend: what a schedule costs; `StaticIssueCycles` when None.
        offsets: by how many slots a move takes an instruction; none may be zero.
        memory_only: whether only memory instructions may be moved.
        horizon: moves after which an episode is truncated.

    Raises:
        UsageError: an offset or the horizon makes no sense, or nothing can be moved.
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
    ) -> None:
        if not offsets or 0 in offsets or len(set(offsets)) != len(offsets):
            raise UsageError(f"wanted distinct offsets other than zero, found {offsets}")
        if horizon < 1:
            raise UsageError(f"wanted a horizon of at least one move, found {horizon}")
        self.program = program
        self.backend: Backend = StaticIssueCycles() if backend is None else backend
        self.offsets = offsets
        self.horizon = horizon
        self.render_mode = render_mode
        self.schedule = Schedule(program.kernel(kernel_name))
        instructions = self.schedule.kernel.instructions
        self.candidates = tuple(
            slot
            for slot in self.schedule.movable_slots
            if not memory_only or instructions[slot].traits.is_memory
        )
        if not self.candidates:
            raise UsageError(f"wanted something to move in {self.schedule.kernel.name}, found nothing")
        self.stop_action = len(self.candidates) * len(offsets)
        self.action_space = gymnasium.spaces.Discrete(self.stop_action + 1)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (len(instructions), _COLUMNS), np.float32)
        self._initial_cost = self._cost = self.backend.cost(self.schedule)
        self._steps = 0
        self._constant = self._constant_columns()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Return to the original schedule."""
        super().reset(seed=seed)
        while self.schedule.history:
            self.schedule.undo()
        self._cost = self._initial_cost
        self._steps = 0
        return self._observation(), self._info()

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Play one move, or stop.

        Raises:
            MoveError: the action is masked.
        """
        self._steps += 1
        truncated = self._steps >= self.horizon
        if int(action) == self.stop_action:
            return self._observation(), 0.0, True, truncated, self._info()
        move = self.move_of(int(action))
        if move is None:
            raise MoveError(f"wanted an action that the mask allows, found {int(action)}")
        self.schedule.play(move)
        before, self._cost = self._cost, self.backend.cost(self.schedule)
        reward = 100.0 * (before - self._cost) / self._initial_cost
        return self._observation(), reward, False, truncated, self._info()

    def move_of(self, action: int) -> Move | None:
        """Return the move that an action stands for now, or None if it is illegal or stops."""
        if not 0 <= action < self.stop_action:
            return None
        candidate, offset = divmod(action, len(self.offsets))
        source = self.schedule.slot_of(self.candidates[candidate])
        move = Move(source, source + self.offsets[offset])
        return move if self.schedule.is_legal(move) else None

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Return which actions are legal; the name is the one MaskablePPO looks for."""
        mask = [self.move_of(action) is not None for action in range(self.stop_action)]
        return np.array([*mask, True])

    def render(self) -> str:
        """Return the current schedule as text."""
        instructions = self.schedule.kernel.instructions
        lines = zip(self.schedule.order, self.schedule.controls(), strict=True)
        return "\n".join(f"{control}  {instructions[index].text}" for index, control in lines)

    def _info(self) -> dict[str, Any]:
        return {
            "backend": self.backend.name,
            "unit": self.backend.unit,
            "cost": self._cost,
            "initial_cost": self._initial_cost,
            "moves": [(move.source, move.target) for move in self.schedule.history],
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
        rows = self._constant[self.schedule.order].copy()
        count = len(rows)
        for slot, control in enumerate(self.schedule.controls()):
            window = self.schedule.window(slot)
            rows[slot, 10] = control.yields
            rows[slot, 11] = control.stall / MAX_STALL
            rows[slot, 16] = (slot - window[0]) / count
            rows[slot, 17] = (window[-1] - slot) / count
        return rows


gymnasium.register(id=ENVIRONMENT_ID, entry_point="kernelwright.rl.assembly_game:AssemblyGameEnv")
