"""Judges that start while something else is loaded: a process with a judge takes many seconds to be of use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from kernelwright.judge import Settings
from kernelwright.pools import Evaluator, Job
from kernelwright.pools.local import Outcome
from kernelwright.records import Candidate, Task

_TASK = Task(
    id="warming",
    source=(
        '"""elementwise: warming up."""\nimport torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n'
        "        return x * 2.0\n\n\ndef get_inputs():\n    return [torch.randn(64, 64)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    ),
)
_CANDIDATE = Candidate(source=_TASK.source.replace("class Model(", "class ModelNew("), policy="warming")


class Warming:
    """A pool that is given one small evaluation for each slot at once, in a thread; what is asked of it waits for that.

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
        # To the end, whatever becomes of them: a pool hands over all that it has taken. What is wrong with the machine is
        # said when real work meets it.
        for _ in self._pool.evaluate([Job(_TASK, _CANDIDATE, settings)] * self._pool.slots):
            pass
