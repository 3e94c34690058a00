"""Rewards: numbers computed from an evaluation's record and nothing else, so that any run can be scored again.

speedup      the paired speedup (CUDA-L1, section 2.4.4); failed or rejected: 0
lower-bound  the lower end of its interval instead: what the judge is sure of
log          its logarithm to base 2, between -4 and 4; failed: -5
clamped      the speedup, but no more than 3 (Dr.Kernel, arXiv 2602.05885)
milestone    -1, 1, 2, 3: failed, right, faster, faster than torch.compile too (CUDA Agent, arXiv 2602.24286)
success      1 or 0: CUDA-L1's self-supervised stage (section 2.3)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from kernelwright.errors import ConfigError, InfrastructureError, KernelwrightError
from kernelwright.records import Candidate, Evaluation, Task

if TYPE_CHECKING:
    from kernelwright.evaluation import Evaluator, JudgePool, Settings

FLOOR = 0.0
"""What a failed or rejected implementation scores (CUDA-L1, table 3: "score 0")."""

CLAMP = 3.0
"""Dr.Kernel clamps the speedup to 0..3."""

LOG_LIMIT = 4.0
"""Largest absolute log2 of a speedup that counts: 16x. Our choice."""

LOG_FLOOR = -5.0
"""Failing is one doubling worse than the slowest that counts. Our choice."""

MILESTONE = 1.05
"""CUDA Agent's milestones are at 5 % faster."""

SUSPICIOUS_SPEEDUP = 3.0
"""CUDA-L1, section 2.4.4: verify again above 3x ..."""

SUSPICIOUS_LEAP = 2.0
"""... or above twice the best so far."""

AGREEMENT = 0.10
"""CUDA-L1, section 2.4.4: two measurements agree when they are less than 10 % apart."""

CLIP = 1.5
"""k of CUDA-L1's equation 6."""

UPDATE_EVERY = 100
"""Rewards between updates of the statistics. CUDA-L1 says 100 iterations; that one is a reward is our reading."""

WINDOW = 1000
"""Latest rewards that the statistics are of. CUDA-L1 says "rolling"; our choice."""

LEAST_DEVIATION = 0.01
"""Rewards are rounded to hundredths, so a smaller spread is none. Our choice."""


class Reward(Protocol):
    """A reward function."""

    @property
    def name(self) -> str:
        """As in a configuration."""
        ...

    @property
    def floor(self) -> float:
        """What a rollout gets that failed, was rejected or cheated; no accepted one gets less."""
        ...

    @property
    def needs_time(self) -> bool:
        """Whether an accepted candidate must have been timed."""
        ...

    def __call__(self, evaluation: Evaluation | None) -> float:
        """The reward of a rollout; None stands for an answer without a candidate.

        Raises:
            ConfigError: the candidate was accepted without being timed, and this reward needs its time.
        """
        ...


@dataclass(frozen=True, slots=True)
class _NamedReward:
    name: str
    floor: float
    accepted: Callable[[Evaluation], float]
    needs_time: bool = True

    def __call__(self, evaluation: Evaluation | None) -> float:
        if evaluation is None or not evaluation.accepted:
            return self.floor
        return max(self.floor, self.accepted(evaluation))


def conservative(speedup: float) -> float:
    """Round to two decimals towards 1 (CUDA-L1, section 2.4.4): 1.118 is 1.11 and 0.992 is 1.00."""
    # 1.15 * 100 is 114.99999999999999: nine decimals drop what binary fractions add.
    hundredths = round(speedup * 100, 9)
    return (math.floor(hundredths) if speedup > 1 else math.ceil(hundredths)) / 100


def reward_named(
    name: str, *, floor: float | None = None, compile_speedups: Mapping[str, float] = MappingProxyType({})
) -> Reward:
    """A reward by its name.

    Args:
        name: `speedup`, `lower-bound`, `log`, `clamped`, `milestone` or `success`.
        floor: What a failure earns, and the least that anything does; None for the reward's own floor.
        compile_speedups: For `milestone`: torch.compile's own speedup, by the task's hash. For a task that is not
            in it, 3 is out of reach.

    Raises:
        ConfigError: there is no such reward.
    """

    def milestone(evaluation: Evaluation) -> float:
        faster = _low(evaluation)
        if faster <= MILESTONE:
            return 1.0
        rival = compile_speedups.get(evaluation.task_sha256)
        return 3.0 if rival is not None and faster > MILESTONE * rival else 2.0

    known = {
        "speedup": _NamedReward("speedup", FLOOR, lambda found: conservative(_speedup(found))),
        "lower-bound": _NamedReward("lower-bound", FLOOR, lambda found: conservative(_low(found))),
        "log": _NamedReward("log", LOG_FLOOR, _log),
        "clamped": _NamedReward("clamped", FLOOR, lambda found: min(CLAMP, conservative(_speedup(found)))),
        "milestone": _NamedReward("milestone", -1.0, milestone),
        "success": _NamedReward("success", 0.0, lambda found: 1.0, needs_time=False),
    }
    if name not in known:
        raise ConfigError(f"Wanted a reward, found `{name}`; known are {', '.join(known)}.")
    return known[name] if floor is None else replace(known[name], floor=floor)


def _log(evaluation: Evaluation) -> float:
    speedup = max(conservative(_speedup(evaluation)), 2**-LOG_LIMIT)
    return min(LOG_LIMIT, math.log2(speedup))


def _speedup(evaluation: Evaluation) -> float:
    return _timed(evaluation, evaluation.speedup)


def _low(evaluation: Evaluation) -> float:
    return _timed(evaluation, evaluation.speedup_low)


def _timed(evaluation: Evaluation, value: float | None) -> float:
    if value is None:
        raise ConfigError(
            f"Wanted a timed evaluation of the task {evaluation.task}; it was accepted without a time. "
            "Turn timing on in the judge's settings, or take the reward `success`."
        )
    return value


def is_suspicious(
    evaluation: Evaluation, best_so_far: float | None, *, above: float = SUSPICIOUS_SPEEDUP, leap: float = SUSPICIOUS_LEAP
) -> bool:
    """Whether a speedup must be measured again before it counts.

    Args:
        evaluation: What was found.
        best_so_far: The highest speedup of this task that counts already; None when there is none.
        above: A speedup above it is suspicious,
        leap: and one that is so many times the best.
    """
    if not evaluation.accepted or evaluation.speedup is None or evaluation.confirms:
        return False
    leapt = best_so_far is not None and evaluation.speedup > leap * best_so_far
    return evaluation.speedup > above or leapt


@dataclass(frozen=True, slots=True)
class Reverification:
    """A suspicious evaluation and its independent re-measurement."""

    task: Task
    first: Evaluation
    second: Evaluation
    """The re-measurement; `confirms` is set."""

    @property
    def agrees(self) -> bool:
        """Whether both were accepted and their speedups are less than 10 % apart, measured by the smaller."""
        first, second = self.first.speedup, self.second.speedup
        if first is None or second is None:
            return False
        return max(first, second) < (1 + AGREEMENT) * min(first, second)

    @property
    def settled(self) -> Evaluation:
        """What counts: the re-measurement where they agree, otherwise the worse of the two.

        The paper says only what is accepted; that a disagreement leaves the worse of the two is our choice.
        """
        # A rejected evaluation has no speedup, and is the worse one.
        return self.second if self.agrees else min(self.second, self.first, key=lambda found: found.speedup or 0.0)


@contextmanager
def judge_for_each(devices: Sequence[str], settings: Settings) -> Iterator[dict[str, JudgePool]]:
    """One pool for each device, as `reverify` wants them. A pool starts no process before its first job."""
    from kernelwright.evaluation import JudgePool

    with ExitStack() as stack:
        yield {device: stack.enter_context(JudgePool([device], settings)) for device in devices}


def reverify(cases: Sequence[tuple[Task, Evaluation]], judges: Mapping[str, Evaluator]) -> list[Reverification]:
    """Measure suspicious candidates again, each in fresh processes on another device than before where there is one.

    Args:
        cases: What to measure again.
        judges: A pool for each device, by the device's name; those of one kind take turns.

    Raises:
        KernelwrightError: a judge failed; what it raised.
    """
    queues: dict[str, list[int]] = {device: [] for device in judges}
    for number, (_, evaluation) in enumerate(cases):
        kind = evaluation.device.partition(":")[0]
        same = [device for device in judges if device.partition(":")[0] == kind]
        others = [device for device in same if device != evaluation.device] or same
        if not others:
            raise InfrastructureError(
                f"Wanted a judge of the kind of {evaluation.device}; there are judges for {', '.join(judges) or 'nothing'}."
            )
        queues[min(others, key=lambda device: len(queues[device]))].append(number)
    found: dict[int, Evaluation] = {}
    for device, numbers in queues.items():
        found |= _measure_again([(number, *cases[number]) for number in numbers], judges[device])
    return [Reverification(task, first, found[number]) for number, (task, first) in enumerate(cases)]


def _measure_again(cases: Sequence[tuple[int, Task, Evaluation]], judge: Evaluator) -> dict[int, Evaluation]:
    """Raises what a judge raised."""
    from kernelwright.evaluation import Job

    jobs = {}
    for number, task, first in cases:
        candidate = Candidate(source=first.source, policy=first.policy, techniques=first.techniques, parent=first.parent)
        jobs[number] = Job(task, candidate)
    found = {}
    for job, outcome in judge.evaluate(jobs.values()):
        if isinstance(outcome, KernelwrightError):
            raise outcome
        number = next(number for number, other in jobs.items() if other is job)
        found[number] = outcome.model_copy(update={"confirms": True})
    return found


class RewardSmoother:
    """clip((reward - mean) / deviation, -k, k) over the latest rewards, as in CUDA-L1 (section 3.2, equation 6).

    Until the first `update_every` rewards have been seen the statistics follow every batch: there is nothing better yet.

    Args:
        clip: k.
        update_every: Rewards between updates of the statistics.
        window: Latest rewards that count.
    """

    def __init__(self, *, clip: float = CLIP, update_every: int = UPDATE_EVERY, window: int = WINDOW) -> None:
        self.clip = clip
        self.update_every = update_every
        self.window = window
        self.mean = 0.0
        self.deviation = 1.0
        self._latest: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._updated_at = 0

    def smooth(self, rewards: Sequence[float]) -> list[float]:
        """Take note of a batch and return it normalised; all of a batch by the same statistics, so its order stays."""
        self._latest.extend(rewards)
        self._seen += len(rewards)
        due = self._seen <= self.update_every or self._seen - self._updated_at >= self.update_every
        if due and self._latest:
            self.mean = statistics.fmean(self._latest)
            self.deviation = max(LEAST_DEVIATION, statistics.pstdev(self._latest))
            self._updated_at = self._seen
        return [max(-self.clip, min(self.clip, (reward - self.mean) / self.deviation)) for reward in rewards]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on later, as JSON."""
        return {
            "clip": self.clip,
            "update_every": self.update_every,
            "window": self.window,
            "mean": self.mean,
            "deviation": self.deviation,
            "latest": list(self._latest),
            "seen": self._seen,
            "updated_at": self._updated_at,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RewardSmoother:
        """The smoother that `state` was taken from."""
        smoother = cls(clip=state["clip"], update_every=state["update_every"], window=state["window"])
        smoother.mean, smoother.deviation = state["mean"], state["deviation"]
        smoother._latest.extend(state["latest"])
        smoother._seen, smoother._updated_at = state["seen"], state["updated_at"]
        return smoother
