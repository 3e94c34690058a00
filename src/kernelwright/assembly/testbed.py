"""Measures schedules: on GPUs in contained processes, or by a model that gives no times.

A testbed has the backends that a search measures with, one for each GPU, and the independent re-measurement that decides at
the end of the search.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelwright.assembly.backends import Backend, GpuBackend, SimulatedIssue, StaticIssueCycles
from kernelwright.errors import DeviceError, UsageError
from kernelwright.files import BINARY_LIMIT_BYTES, has_text_name, read_regular
from kernelwright.gpu import disassemble, driver
from kernelwright.gpu.launch_spec import LaunchSpec, Target
from kernelwright.gpu.launcher import Launcher, cuda_launcher_on
from kernelwright.gpu.target import find_target, require_architecture
from kernelwright.judge.schedules import CONFIRMING, PROCESSES, Confirmation, ContainedLauncher, ScheduleTrial, confirm
from kernelwright.sass import Kernel, Program, Schedule, load
from kernelwright.sass.elf import naming_file

SIMULATED_BACKENDS = (StaticIssueCycles.name, SimulatedIssue.name)
"""Backends that need no GPU and give no times."""
GPU_BACKEND = "gpu"
DEFAULT_ARCHITECTURE = 90


class SimulatedTestbed:
    """A testbed of one model that measures in some lanes side by side.

    Deterministic: measuring again gives the same, which proves nothing about a GPU.
    """

    is_simulated = True

    def __init__(self, backend: Backend, architecture: int, lanes: int = 1) -> None:
        self.backends = [backend] * lanes
        self.architecture = architecture

    def begin_search(self) -> None:
        """There is nothing to forget."""

    def confirm(self, schedules: Sequence[Schedule]) -> list[Confirmation]:
        """Return the model's ratios once more; no process is started."""
        return [self.weigh(schedule) for schedule in schedules]

    def weigh(self, schedule: Schedule) -> Confirmation:
        """Return the model's ratio."""
        found = self.backends[0].measure(schedule)
        if found.relative is None:
            return Confirmation.of_failure(found.detail or str(found.status), 0)
        speedup = 1.0 / found.relative
        return Confirmation(speedup, speedup, speedup, 0.0, found.baseline, None, 0)

    def describe(self) -> dict[str, Any]:
        """Return the model's name."""
        return {"backend": self.backends[0].name, "simulated": True, "architecture": self.architecture}

    def close(self) -> None:
        """Nothing was started."""


class GpuTestbed:
    """A testbed of GPUs, named by their ordinals, each with a process of its own that runs schedules.

    Args:
        launcher_on: makes the launcher of one device in the child; importable by name.
        processes: fresh processes of a re-measurement.

    Raises:
        DeviceError: there is no such GPU, or the original does not run on it.
    """

    is_simulated = False

    def __init__(
        self,
        target: Target,
        program: Program,
        devices: Sequence[int] = (0,),
        launcher_on: Callable[[int, LaunchSpec], Launcher] = cuda_launcher_on,
        processes: int = PROCESSES,
    ) -> None:
        self._target = target
        self._program = program
        self._processes = processes
        self._scale: ContainedLauncher | None = None
        self._null: list[float] | None = None
        self._original_us = 0.0
        self._factories = [functools.partial(launcher_on, device) for device in devices]
        self._gpus = [GpuBackend(program, target, factory=factory) for factory in self._factories]
        self.backends = self._gpus
        # The first question is answered by a process that has found its GPU, or by an error that says why not.
        self._identity = self._gpus[0].gpu

    def begin_search(self) -> None:
        """Let the next search earn its long measurements anew: only what beats the best so far is timed at length."""
        for backend in self._gpus:
            backend.best_speedup = 1.0

    def confirm(self, schedules: Sequence[Schedule]) -> list[Confirmation]:
        """Time schedules in fresh processes of the first GPU, with an A/A control in each, and compare their outputs.

        All share the processes, since starting one takes longer than timing in it. A schedule that fails in one is not
        tried in the next.
        """
        cubins = [schedule.cubin(self._program) for schedule in schedules]
        return confirm(self._target, cubins, processes=self._processes, factory=self._factories[0])

    def weigh(self, schedule: Schedule) -> Confirmation:
        """Time a schedule carefully in one process that is kept for this, with an A/A control; outputs are not compared."""
        if self._scale is None:
            self._scale = ContainedLauncher(self._target.spec, self._target.cubin, self._factories[0])
        if self._null is None:
            null = self._scale.time(self._target.cubin, CONFIRMING)
            self._null = [math.log(ratio) for ratio in null.ratios]
            self._original_us = statistics.median(null.original_us)
        trial = ScheduleTrial(CONFIRMING)
        trial.run(self._scale, schedule.cubin(self._program), range(0))
        return trial.confirmation([self._null], self._original_us)

    def describe(self) -> dict[str, Any]:
        """Return the GPU, the driver, and how often schedules ended their process or gave wrong outputs."""
        counts: dict[str, int] = {}
        for backend in self._gpus:
            for status, count in backend.counts.items():
                counts[str(status)] = counts.get(str(status), 0) + count
        return {
            "backend": GPU_BACKEND,
            "simulated": False,
            "gpu": asdict(self._identity),
            "gpus": len(self._gpus),
            "statuses": counts,
            "restarts": sum(backend.restarts for backend in self._gpus),
        }

    def close(self) -> None:
        """End the processes."""
        if self._scale is not None:
            self._scale.close()
        for backend in self._gpus:
            backend.close()


def simulated_testbed(name: str, architecture: int, lanes: int = 1) -> SimulatedTestbed:
    """Return the testbed of a model by its name.

    Raises:
        UsageError: there is no such model.
    """
    if name == StaticIssueCycles.name:
        return SimulatedTestbed(StaticIssueCycles(), architecture, lanes)
    if name == SimulatedIssue.name:
        return SimulatedTestbed(SimulatedIssue(architecture), architecture, lanes)
    raise UsageError(f"wanted a backend out of {', '.join((GPU_BACKEND, *SIMULATED_BACKENDS))}, found {name!r}")


Testbed = SimulatedTestbed | GpuTestbed


@dataclass(frozen=True, slots=True)
class Game:
    """A kernel of a cubin to tune, and the testbed of its schedules.

    `target` is its launch; None with a model and a bare cubin.
    """

    name: str
    program: Program
    testbed: Testbed
    kernel_name: str | None = None
    target: Target | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel that is played on."""
        return self.program.kernel(self.kernel_name)

    def __enter__(self) -> Game:
        return self

    def __exit__(self, *_: object) -> None:
        self.testbed.close()


def open_game(target: Target, backend: str = GPU_BACKEND, gpus: int = 1) -> Game:
    """Set up the game on a target, with the backend `gpu` on some GPUs side by side, or one of `SIMULATED_BACKENDS`.

    Raises:
        UsageError: there is no such backend.
        DeviceError: there is no GPU.
        ToolchainError: the disassembler is missing.
    """
    program = load(target.cubin, disassemble)
    testbed: Testbed
    if backend == GPU_BACKEND:
        testbed = GpuTestbed(target, program, range(gpus))
    else:
        testbed = simulated_testbed(backend, target.architecture, gpus)
    return Game(target.spec.name, program, testbed, target.spec.entry, target)


def find_game(
    text: str, backend: str = GPU_BACKEND, architecture: int | None = None, gpus: int = 1, kernel_name: str | None = None
) -> Game:
    """Set up the game on the target that a name stands for, with a backend and GPUs as in `open_game`.

    Args:
        text: a target as `kernelwright.gpu.target` spells them; with a model also a bare cubin.
        architecture: compute capability times ten to compile for; the GPU's own, or 90 with a model, when None.
        kernel_name: which kernel of a bare cubin, when there are several.

    Raises:
        UsageError: the target or the backend does not exist, the target has another kernel or architecture than was asked
        for, or a bare cubin was to be measured.
        DeviceError: there is no GPU.
        ToolchainError: a compiler or disassembler is missing.
    """
    if not has_text_name(text):
        raise UsageError(f"Wanted a target with a name of UTF-8 text, found {text!a}, which no record can hold. Rename it.")
    if Path(text).suffix == ".cubin":
        return _game_of_cubin(text, backend, architecture, gpus, kernel_name)
    # A mistyped name is told wherever it is typed, also where there is no GPU.
    build = find_target(text)
    default = _gpu_architecture() if backend == GPU_BACKEND else DEFAULT_ARCHITECTURE
    return open_game(_as_asked(build(architecture or default), text, architecture, kernel_name), backend, gpus)


def _gpu_architecture() -> int:
    """The GPU's architecture; the error where there is none names the backends that need none."""
    try:
        return driver.gpu_identity(0).architecture
    except DeviceError as error:
        raise DeviceError(
            f"{error}, or choose a model that needs no GPU and gives no times: --backend {' or '.join(SIMULATED_BACKENDS)}"
        ) from error


def _game_of_cubin(text: str, backend: str, architecture: int | None, gpus: int, kernel_name: str | None) -> Game:
    if backend == GPU_BACKEND:
        raise UsageError(
            f"Wanted a target that can be launched, found the bare cubin {text}. Describe its launch in a .toml "
            f"file (docs/deploy.md), or choose a backend out of {', '.join(SIMULATED_BACKENDS)}."
        )
    try:
        data = read_regular(Path(text), BINARY_LIMIT_BYTES)
    except OSError as error:
        raise UsageError(f"Wanted a cubin at {text}, found: {error.strerror}. Check the path.") from error
    with naming_file(text):
        program = load(data, disassemble)
    found = program.image.architecture
    require_architecture(found, text, architecture)
    return Game(Path(text).stem, program, simulated_testbed(backend, found, gpus), kernel_name)


def _as_asked(target: Target, text: str, architecture: int | None, kernel_name: str | None) -> Target:
    """Return the target, unless its kernel or architecture is not what was asked for."""
    if kernel_name not in (None, target.spec.entry):
        raise UsageError(
            f"Wanted the kernel {kernel_name}, found {text}, which launches {target.spec.entry}. A kernel is chosen only "
            "in a bare cubin; leave it out."
        )
    require_architecture(target.architecture, text, architecture)
    return target
