"""Decides whose reward may be an estimate: the judge takes a share of all candidates, and every outlier.

An estimate comes from a process that the candidate ran in, and could have forged. So it is no verdict: such a candidate
never becomes an exemplar, and how often estimates and verdicts disagree is a metric of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kernelwright.contrastive.sampling.judging import JudgedRun, Key, Proposal
from kernelwright.execution.local import Job
from kernelwright.execution.screens import Screens
from kernelwright.records import Evaluation, Task, sha256_of
from kernelwright.records.screened import Screened

AGREEMENT = 1.10
"""Largest factor between an estimate and the judge's interval that still counts as agreement. Our choice, after the 10 % of
CUDA-L1's second measurement (section 2.4.4)."""


class Estimator:
    """Estimates candidates of a run, and chooses those that the judge must take in spite of it.

    Args:
        judged: Evaluations of the run, in whose directory estimates are kept.
        screens: Makes estimates.
        share: Share of candidates whose reward may be an estimate.
        above: Estimate above which the judge takes a candidate,
        leap: and multiple of the task's best speedup so far above which it does.
    """

    def __init__(self, judged: JudgedRun, screens: Screens, share: float, above: float, leap: float) -> None:
        self._judged, self._screens, self._share, self._above, self._leap = judged, screens, share, above, leap
        self._known: dict[Key, Screened] = {(one.task_sha256, one.candidate_sha256): one for one in judged.run.screened()}

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Start what will make estimates of these tasks' candidates."""
        self._screens.prepare(tasks)

    def estimate(self, proposals: Sequence[Proposal], best: Mapping[str, float | None]) -> dict[Key, Screened]:
        """Estimates that stand for a verdict; candidates that are missing must be judged."""
        unseen = {one.key: one for one in proposals if self._judged.known(one) is None}
        for job, found in self._screens.look(
            Job(one.task, one.candidate) for key, one in unseen.items() if key not in self._known
        ):
            self._judged.run.append(found)
            self._known[job.task.sha256, job.candidate.sha256] = found
        return {
            key: self._known[key]
            for key in unseen
            if key in self._known and self._is_let_off(key) and not self._is_outlier(self._known[key], best[key[0]])
        }

    def _is_let_off(self, key: Key) -> bool:
        """Whether the draw spares the judge a candidate. A run that was killed draws the same again."""
        return int(sha256_of("".join(key))[:8], 16) < self._share * 2**32

    def _is_outlier(self, found: Screened, best: float | None) -> bool:
        if not found.correct:
            return False
        estimate = found.estimate
        too_fast = estimate is None or estimate > self._above or estimate > self._leap * (best or 1.0)
        return too_fast or found.is_beyond_roofline

    def metrics(self, keys: Iterable[Key]) -> dict[str, float]:
        """Two shares of different candidates: `screened_share`, of those with an estimate, that the judge did not take; and
        `screen_disagreement`, of those that both looked at, on which they disagree."""
        both = [(self._known[key], self._judged.of(key)) for key in dict.fromkeys(keys) if key in self._known]
        checked = [(one, verdict) for one, verdict in both if verdict is not None]
        values = {"screened_share": 1 - len(checked) / len(both)} if both else {}
        if checked:
            values["screen_disagreement"] = sum(disagree(one, verdict) for one, verdict in checked) / len(checked)
        return values


def disagree(estimate: Screened, verdict: Evaluation) -> bool:
    """Whether an estimate and a verdict contradict each other: in what is right, or in how fast it is."""
    if not (estimate.correct and verdict.accepted):
        return estimate.correct != verdict.accepted
    if estimate.estimate is None or verdict.speedup_low is None or verdict.speedup_high is None:
        return False
    return not verdict.speedup_low / AGREEMENT <= estimate.estimate <= verdict.speedup_high * AGREEMENT
