"""Measures the best baseline of each task once: the reference itself or, where that is faster, a CUDA graph of it.

A reward against the best baseline pays nothing for a graph around the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kernelwright.contrastive.sampling.judging import JudgedRun, Proposal
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.rewrites.baselines import baseline_source

GRAPH = "cudagraph-fresh"
"""The graph that keeps a drop-in's contract, as an answer must."""
EAGER = "eager"


class BestBaselines:
    """Speedups of best baselines over the reference.

    Args:
        judged: Measurements of graphs, in a run directory of their own.
        device: Kind of device. On a CPU there are no graphs, and eager is the best baseline.
    """

    def __init__(self, judged: JudgedRun, device: str) -> None:
        self._judged, self._has_graphs = judged, device.startswith("cuda")
        self.speedups: dict[str, float] = {}
        """By the task's hash; 1.0 where the reference itself is the best."""

    def measure(self, tasks: Iterable[Task], stop: Callable[[], bool] | None = None) -> bool:
        """Measure the tasks that are not known yet; False where `stop` left some out. A graph that fails is no baseline.

        What the run directory holds of a task stands, even if a later version writes another graph: all steps of a run are
        rewarded against the same measurement.
        """
        unknown = [task for task in dict.fromkeys(tasks) if task.sha256 not in self.speedups]
        if not self._has_graphs:
            self.speedups |= {task.sha256: 1.0 for task in unknown}
            return True
        for task in unknown:
            if history := self._judged.history(task):
                self._note(history[0])
        wanted = [
            Proposal(task, Candidate(source=baseline_source(task, GRAPH), policy="baseline", techniques=(GRAPH,)))
            for task in unknown
            if task.sha256 not in self.speedups
        ]
        found = self._judged.judge(wanted, stop)
        stopped = stop is not None and stop()
        for one in wanted:
            evaluation = found.get(one.key)
            if evaluation is not None:
                self._note(evaluation)
            elif not stopped:
                self.speedups[one.task.sha256] = 1.0  # the machine could not measure it
        return all(one.task.sha256 in self.speedups for one in wanted)

    def _note(self, graph: Evaluation) -> None:
        self.speedups[graph.task_sha256] = max(1.0, (graph.accepted and graph.speedup) or 1.0)

    def of(self, task_sha256: str) -> tuple[str, float]:
        """Name of a task's best baseline, and its speedup over the reference."""
        speedup = self.speedups.get(task_sha256, 1.0)
        return (GRAPH if speedup > 1 else EAGER), speedup
