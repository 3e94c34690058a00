"""Composes both levels: tunes a winner's Triton kernels in the assembly game, and judges the winner with the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kernelwright.assembly.search import AssemblyResult, GameSettings, optimize_kernel
from kernelwright.assembly.testbed import open_game
from kernelwright.deploy.compose import TunedLaunch, capture_candidate, compose
from kernelwright.errors import DeviceError, KernelwrightError
from kernelwright.execution.evaluator import Evaluator
from kernelwright.execution.local import Job
from kernelwright.gpu.launch_spec import KernelLaunch, Target
from kernelwright.records import Candidate, Evaluation, RunDirectory, Task
from kernelwright.records.decisions import TUNED_SCHEDULE, is_composed

Capture = Callable[[Task, Candidate], list[KernelLaunch]]
Tune = Callable[[Target, Path], AssemblyResult]
Tell = Callable[[str], None]


def tune_kernels(
    run: RunDirectory,
    pool: Evaluator,
    task: Task,
    best: Evaluation,
    *,
    tune: Tune,
    tell: Tell,
    capture: Capture = capture_candidate,
    rival: Callable[[], Candidate | None] = lambda: None,
) -> Evaluation:
    """Hand the winner's Triton kernels to the assembly game and judge what comes of it like any other candidate.

    Each kernel is tuned in a folder `sass-N-NAME` of the run directory, which resumes like any run; what was judged before
    is not judged again.

    Args:
        run: Of the search.
        pool: Judges.
        task: What is sped up.
        best: The confirmed winner.
        tune: Plays the game on one kernel in a directory; its winner is proven and confirmed.
        tell: Told about progress.
        capture: Finds the kernels that a candidate launches.
        rival: Baseline to time beside the confirmation, where one is known by then.

    Returns:
        The confirming evaluation of the composed candidate where that is faster than `best`, else `best`.

    Raises:
        DeviceError: the winner's launches could not be captured, or the machine is at fault.
    """
    winner = best.candidate()
    earlier = [found for found in run.evaluations() if is_composed(found) and found.parent == best.candidate_sha256]
    first = next((found for found in earlier if not found.confirms), None)
    if first is None:
        composed = _compose(run, task, winner, tune, capture, tell)
        if composed is None:
            return best
        tell("judging the winner with its tuned kernels")
        first = _judged(pool, task, composed)
        run.append(first)
    if not first.is_improvement:
        tell(f"with tuned kernels: {first.reason or 'no improvement'}; the winner stays as it was")
        return best
    again = next((found for found in earlier if found.confirms), None)
    if again is None:
        tell("confirming the winner with its tuned kernels")
        again = measured_again(run, pool, task, first, rival())
    if again.is_improvement and (again.speedup or 0.0) > (best.speedup or 0.0):
        return again
    tell("the tuned kernels did not make the whole faster; the winner stays as it was")
    return best


def _compose(run: RunDirectory, task: Task, winner: Candidate, tune: Tune, capture: Capture, tell: Tell) -> Candidate | None:
    tell("capturing the winner's kernels")
    launches = capture(task, winner)
    if not launches:
        tell("the winner launches no Triton kernel; nothing to tune")
        return None
    kernels = []
    for number, launch in enumerate(launches):
        kernel = TunedLaunch(launch)
        if launch.target is not None:
            result = tune(launch.target, _folder(run, number, launch.target))
            kernel = TunedLaunch(launch, result.tuned, result.best)
        tell(f"{launch.function}: {kernel.refusal or 'a faster schedule holds in fresh processes'}")
        kernels.append(kernel)
    composed = compose(winner, kernels)
    if composed is None:
        return None
    return composed.model_copy(update={"techniques": (*winner.techniques, TUNED_SCHEDULE), "parent": winner.sha256})


def play_with(agent: str, budget: int, seed: int) -> Tune:
    """A `Tune` that lets one agent play on the GPU; raises UsageError where there is no such agent."""
    settings = GameSettings((agent,), budget, seed)

    def tune(target: Target, out: Path) -> AssemblyResult:
        with open_game(target) as game:
            return optimize_kernel(game, out=out, settings=settings)

    return tune


def needs_gpu(device: str) -> None:
    """Raise DeviceError for a search on a CPU, where there is nothing to tune."""
    if not device.startswith("cuda"):
        raise DeviceError(
            f"Wanted a GPU, whose machine code can be tuned; found the device {device}. Leave out --then-sass."
        )


def measured_again(
    run: RunDirectory, pool: Evaluator, task: Task, found: Evaluation, rival: Candidate | None = None
) -> Evaluation:
    """Measure a winner once more, in fresh processes on fresh seeds, and record that as its confirmation."""
    again = _judged(pool, task, found.candidate(), rival).model_copy(update={"confirms": True})
    run.append(again)
    return again


def _judged(pool: Evaluator, task: Task, candidate: Candidate, rival: Candidate | None = None) -> Evaluation:
    ((_, outcome),) = pool.evaluate([Job(task, candidate, rival=rival)])
    if isinstance(outcome, KernelwrightError):
        raise outcome
    return outcome


def _folder(run: RunDirectory, number: int, target: Target) -> Path:
    return run.path / f"sass-{number}-{re.sub(r'[^A-Za-z0-9_.-]', '_', target.spec.name)[:60]}"
