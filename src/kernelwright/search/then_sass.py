"""Composes both levels: tunes a winner's Triton kernels in the assembly game, and lets the winner carry the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kernelwright.assembly.search import GameSettings, optimize_kernel
from kernelwright.assembly.testbed import open_game
from kernelwright.deploy.compose import TunedLaunch, capture_candidate, compose
from kernelwright.deploy.deploy import confirm_one
from kernelwright.errors import DeviceError
from kernelwright.gpu.launch_spec import KernelLaunch, Target
from kernelwright.records import Candidate, Task
from kernelwright.records.decisions import TUNED_SCHEDULE


@dataclass(frozen=True, slots=True)
class KernelTuner:
    """Has an agent play on a winner's Triton kernels.

    Each kernel is tuned in a folder `sass-N-NAME` of the run directory, which resumes like any run.
    """

    out: Path
    """The run directory."""
    settings: GameSettings

    def compose(self, task: Task, winner: Candidate, log: Callable[[str], None]) -> Candidate | None:
        """The winner with its tuned kernels; None where none got faster.

        Raises:
            DeviceError: the winner's launches could not be captured, or the machine is at fault.
        """
        log("capturing the winner's kernels")
        launches = capture_candidate(task, winner)
        if not launches:
            log("the winner launches no Triton kernel; nothing to tune")
            return None
        kernels = []
        for number, launch in enumerate(launches):
            kernel = self.play(launch, launch.target, number) if launch.target is not None else TunedLaunch(launch)
            log(f"{launch.function}: {kernel.refusal or 'a faster schedule holds in fresh processes'}")
            kernels.append(kernel)
        composed = compose(winner, kernels)
        if composed is None:
            return None
        return composed.model_copy(update={"techniques": (*winner.techniques, TUNED_SCHEDULE), "parent": winner.sha256})

    def play(self, launch: KernelLaunch, target: Target, number: int) -> TunedLaunch:
        """Tune one kernel; the result is proven and confirmed."""
        with open_game(target) as game:
            result = optimize_kernel(game, out=self._folder(number, target), settings=self.settings)
        kernel = TunedLaunch(launch, result.tuned, result.best)
        if kernel.cubin is None or kernel.confirmation is None or kernel.confirmation.gpu is not None:
            return kernel
        # A record of an earlier process does not name its GPU.
        return replace(kernel, confirmation=confirm_one(target, kernel.cubin))

    def _folder(self, number: int, target: Target) -> Path:
        return self.out / f"sass-{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', target.spec.name)[:60]}"


def needs_gpu(device: str) -> None:
    """Raise DeviceError for a search on a CPU, where there is nothing to tune."""
    if not device.startswith("cuda"):
        raise DeviceError(
            f"Wanted a GPU, whose machine code can be tuned; found the device {device}. Leave out --then-sass."
        )
