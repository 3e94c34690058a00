"""Asks a policy for candidates of one task as places to look at them become free, up to a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernelwright.errors import NothingUsableError
from kernelwright.records import Candidate, Evaluation, Task
from kernelwright.records.policy import Context, Policy
from kernelwright.records.screened import Screened
from kernelwright.search.tuning import variants


class Proposals:
    """Proposals for one task, and what has been found of them.

    Args:
        task: The task.
        policy: Proposer of candidates.
        device: Resolved name.
        budget: Proposals to look at, those found already included.
        seed: Seed of the policy.
        judged: Verdicts so far; the caller appends to it.
        screened: Estimates so far; the caller appends to it.
        tell: Callback for what the policy has to say, and whether that lasts.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        device: str,
        budget: int,
        seed: int,
        judged: list[Evaluation],
        screened: list[Screened],
        tell: Callable[[str, bool], None] = lambda text, lasting: None,
    ) -> None:
        self._task, self._policy, self._device, self._budget, self._seed = task, policy, device, budget, seed
        self.judged, self.screened, self._tell = judged, screened, tell

    @property
    def _context(self) -> Context:
        return Context(
            task=self._task,
            device=self._device,
            history=tuple(self.judged),
            seed=self._seed,
            screened=tuple(self.screened),
        )

    @property
    def done(self) -> int:
        """Proposals that were looked at."""
        return len(self._context.seen)

    def candidates(self, slots: int) -> Iterator[Candidate | None]:
        """Candidates to look at, one after the other; None where the next depends on one that is being looked at.

        The policy is asked for as many as there are slots, when none is left of those that it gave before.
        """
        taken = self._context.seen
        waited_at = -1
        while len(taken) < self._budget:
            if waited_at == self.done:  # nothing has been found since
                yield None
                continue
            busy = len(taken) - self.done
            self._tell("proposing", False)
            try:
                # It does not know of those at work, and may name them again.
                proposed = self._policy.propose(self._context, min(slots + busy, self._budget - self.done))
                # Every other place is for the knobs of what was found so far, and all once the policy has nothing more.
                new = sum(one.sha256 not in taken for one in proposed)
                proposed = [*variants(self.screened, taken, max(1, slots - new, slots // 2)), *proposed]
            except NothingUsableError as error:
                if not taken:
                    raise
                self._tell(str(error), True)
                return
            fresh = {one.sha256: one for one in proposed if one.sha256 not in taken}
            for sha256, candidate in list(fresh.items())[: self._budget - len(taken)]:
                taken.add(sha256)
                yield candidate
            if fresh:
                continue
            if not busy:
                self._tell("the policy has nothing more to try", True)
                return
            waited_at = self.done
            yield None
