"""Starts judges in the background while the model loads, because a judge's process takes many seconds to be ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from kernelwright.judge import Settings
from kernelwright.pools.evaluator import Evaluator
from kernelwright.pools.local import Job, Outcome
from kernelwright.records import Candidate, Task

_TASK = Task(
    id="prefetch",
    source=(
        '"""elementwise: prefetch."""\nimport torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n'
        "        return x * 2.0\n\n\ndef get_inputs():\n    return [torch.randn(64, 64)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    ),
)
_CANDIDATE = Candidate(source=_TASK.source.replace("class Model(", "class ModelNew("), policy="prefetch")


class PrefetchedJudges:
    """A pool whose processes start at once, in a thread; `evaluate` waits until each has done one small evaluation.

    Args:
        pool: Whose processes to start.
    """

    def __init__(self, pool: Evaluator) -> None:
        self._pool = pool
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    @property
    def slots(self) -> int:
        """As of the pool."""
        return self._pool.slots

    def evaluate(self, jobs: Iterable[Job], stop: Callable[[], bool] | None = None) -> Iterator[tuple[Job, Outcome]]:
        """As of the pool, once its processes are there."""
        self._thread.join()
        yield from self._pool.evaluate(jobs, stop)

    def _start(self) -> None:
        settings = Settings.quick(timed=False, thorough=False)
        # All are consumed, because a pool hands over all that it has taken. Real work reports faults of the machine.
        for _ in self._pool.evaluate([Job(_TASK, _CANDIDATE, settings)] * self._pool.slots):
            pass
